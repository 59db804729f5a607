# SPDX-License-Identifier: Apache-2.0
"""The optimizers that scenarios run with, by name."""

from __future__ import annotations

import sys
from importlib import import_module

import torch
from torch.optim.optimizer import ParamsT

from swap_testkit.torch.hyper_standin import HYPER_MODULE, install
from swap_testkit.torch.trainer import OptimizerFactory

__all__ = ["OPTIMIZERS"]


def _adam(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, weight_decay=0.01)


def _adam_amsgrad(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, amsgrad=True)


def _adamw(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _adamw_fused(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def _hyper_adamw(params: ParamsT) -> torch.optim.Optimizer:
    """HyperParallel's if it is installed, else a stand-in of its interface."""
    try:
        module = import_module(HYPER_MODULE)
    except ImportError:
        install()
        module = sys.modules[HYPER_MODULE]
    optimizer: torch.optim.Optimizer = vars(module)["AdamW"](params, lr=1e-2)
    return optimizer


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adam": _adam,
    "adam-amsgrad": _adam_amsgrad,
    "adamw": _adamw,
    "adamw-fused": _adamw_fused,
    "hyper-adamw": _hyper_adamw,
}
"""Factories, by name."""
