# SPDX-License-Identifier: Apache-2.0
"""torchtitan's debug models, made so that they train on any device, small and repeatably."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import muon_llama3
import swapped_llama3
from _trace import trace_of
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel

ASSETS = "TITAN_TEST_ASSETS"
"""Environment variable: the folder of :func:`_assets.make_assets`."""


class NotedOptimizersContainer(OptimizersContainer):
    """Stands for a third party's."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        note: str = ""


def llama3():
    return portable(llama3_debugmodel())


def example():
    return portable(swapped_llama3.debugmodel())


def llama3_adam():
    config = llama3()
    for group in config.optimizer.param_groups:
        group.optimizer_name = "Adam"
    return config


def llama3_groups():
    """Norms without weight decay and with a learning rate of their own."""
    config = llama3()
    (rest,) = config.optimizer.param_groups
    norms = ParamGroupConfig(
        pattern="norm",
        optimizer_name="AdamW",
        optimizer_kwargs={**rest.optimizer_kwargs, "lr": 1e-3, "weight_decay": 0.0},
    )
    adam = ParamGroupConfig(
        pattern="tok_embeddings",
        optimizer_name="Adam",
        optimizer_kwargs={"lr": 5e-4, "amsgrad": True, "fused": False},
    )
    config.optimizer.param_groups = [norms, adam, rest]
    return config


def llama3_other():
    config = llama3()
    config.optimizer = derive(config.optimizer, NotedOptimizersContainer.Config, note="mine")
    return config


def llama3_muon():
    config = portable(muon_llama3.debugmodel())
    (muon,) = (each for each in config.optimizer.param_groups if each.optimizer_name == "Muon")
    # Its bfloat16 products take seconds on a CPU: one matrix of each layer, and few iterations.
    muon.pattern, muon.optimizer_kwargs["ns_steps"] = "attention.wo", 2
    return config


def deepseek_v3():
    return portable(deepseek_v3_debugmodel())


def portable(config):
    """What the debug models lack to train without a GPU, and the sizes of a test."""
    assets = Path(os.environ[ASSETS])
    config.hf_assets_path = str(assets / "tokenizer")
    config.dataloader.dataset_path = str(assets / "data")
    _replace_parts(config.model_spec)
    # Four stages of a pipeline, and all kinds of layers: deepseek's first has no experts.
    del config.model_spec.model.layers[4:]
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, 16, 6
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    config.lr_scheduler.total_steps = 8
    config.activation_checkpoint = None
    config.validator.enable = False
    config.debug.seed, config.debug.enable_structured_logging = 7, False
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 3, False
    config.metrics.log_freq = 1
    config.metrics = trace_of(config.metrics)
    return config


def _replace_parts(spec):
    """Attention without a backward on the CPU, and collectives that gloo does not have."""
    for old, new, changes in (
        (FlexAttention, ScaledDotProductAttention, {}),
        (ComplexRoPE, CosSinRoPE, {"scaling": "none", "max_seq_len": 1024}),
    ):
        for _, part, parent, attribute in list(spec.model.traverse(old.Config)):
            setattr(parent, attribute, derive(part, new.Config, **changes))
    parallelize = spec.parallelize_fn

    def with_sums_only(model, **arguments):
        model = parallelize(model, **arguments)
        for module in model.modules():
            if "set_force_sum_reduction_for_comms" in dir(module):  # those that FSDP2 wrapped
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = with_sums_only
