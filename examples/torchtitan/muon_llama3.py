# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of the blocks and AdamW for the rest, in one container.

torchtitan 0.3 builds Adam, AdamW and its own DistMuon by name. A container of ours adds
``torch.optim.Muon``, and swapping wraps what it builds like anything else:

torchrun --nproc-per-node 8 -m torchtitan.train --module swap_torch.integrations.torchtitan \
    --config muon_llama3.debugmodel --optimizer.swap-optimizer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel


class WithMuon(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "Muon":
            return torch.optim.Muon
        return OptimizersContainer._resolve_optimizer_factory(name)


def with_muon() -> WithMuon.Config:
    """The first pattern that a parameter's name matches decides, so norms come first."""
    adamw = {"lr": 8e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    muon = {"lr": 2e-3, "weight_decay": 0.1, "momentum": 0.95}
    return WithMuon.Config(
        param_groups=[
            ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs=adamw),
            ParamGroupConfig(pattern="^layers", optimizer_name="Muon", optimizer_kwargs=muon),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw),
        ]
    )


def debugmodel():
    config = llama3_debugmodel()
    config.optimizer = with_muon()
    return config
