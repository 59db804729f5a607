# SPDX-License-Identifier: Apache-2.0
"""The optimizers that scenarios run with, by name."""

from __future__ import annotations

import sys

import torch
from torch.optim.optimizer import ParamsT

from swap_testkit.torch.trainer import OptimizerFactory

__all__ = ["HYPER_MODULE", "OPTIMIZERS"]

HYPER_MODULE = "hyper_parallel.core.optimizer.adamw"


def _adam(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, weight_decay=0.01)


def _adam_amsgrad(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, amsgrad=True)


def _adamw(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _adamw_fused(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def _hyper_adamw(params: ParamsT) -> torch.optim.Optimizer:
    """HyperParallel's, if its module is there: the real one, or what a test put in its place."""
    module = sys.modules.get(HYPER_MODULE)
    if module is None:
        raise ImportError(
            f"The optimizer 'hyper-adamw' needs {HYPER_MODULE}, which is not imported. Install "
            f"HyperParallel and import that module before."
        )
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
