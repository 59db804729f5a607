# SPDX-License-Identifier: Apache-2.0
"""Ready-made trainings on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspore import Parameter, Tensor, nn

from swap_testkit.mindspore.model import (
    LanguageModel,
    ModelShape,
    lm_loss,
    text_batch,
    unit_initialised,
)
from swap_testkit.mindspore.trainer import Job, OptimizerFactory

__all__ = ["OPTIMIZERS", "SCENARIOS", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way of training."""

    name: str
    about: str
    build: Callable[[OptimizerFactory, int], Job]
    """From an optimizer factory and a seed to a job."""


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adam": lambda params: nn.Adam(params, 1e-2),
    "adam-nesterov": lambda params: nn.Adam(params, 1e-2, use_nesterov=True),
    "adam-amsgrad": lambda params: nn.Adam(params, 1e-2, use_amsgrad=True),
    "adam-weight-decay": lambda params: nn.AdamWeightDecay(params, 1e-2, weight_decay=0.1),
}


def lm_batch_loss(net: nn.Cell, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch of text."""
    return lm_loss(net(batch[0]), batch[1])


def _job(optimizer: OptimizerFactory, seed: int, **options: Any) -> Job:  # noqa: ANN401
    recompute = options.pop("recompute", False)
    net = unit_initialised(LanguageModel(ModelShape(layers=1), recompute=recompute), seed)
    return Job(net, optimizer, text_batch, lm_batch_loss, **options)


def _groups(optimizer: OptimizerFactory, seed: int) -> Job:
    def in_groups(params: list[Parameter]) -> nn.Optimizer:
        decay = [param for param in params if len(param.shape) > 1]
        rest = [param for param in params if len(param.shape) <= 1]
        groups: list[Any] = [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest, "lr": 5e-3},
            {"order_params": params},
        ]
        return optimizer(groups)

    return _job(in_groups, seed)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("single", "a small language model on real text", _job),
        Scenario("groups", "groups with a learning rate and weight decay of their own", _groups),
        Scenario(
            "recompute",
            "each block computed again in the backward pass",
            lambda optimizer, seed: _job(optimizer, seed, recompute=True),
        ),
        Scenario(
            "clip",
            "gradients clipped by their global norm",
            lambda optimizer, seed: _job(optimizer, seed, clip_norm=0.1),
        ),
    )
}
