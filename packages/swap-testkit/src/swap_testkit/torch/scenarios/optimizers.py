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


def _sgd(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.01)


def _nadam(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-2, weight_decay=0.01)


def _radam(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.RAdam(params, lr=1e-2)


def _adagrad(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1)


def _rmsprop(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True)


def _adamax(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adamax(params, lr=1e-2)


def _adafactor(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adam": _adam,
    "adam-amsgrad": _adam_amsgrad,
    "adamw": _adamw,
    "adamw-fused": _adamw_fused,
    "hyper-adamw": _hyper_adamw,
    "sgd": _sgd,
    "nadam": _nadam,
    "radam": _radam,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "adamax": _adamax,
    "adafactor": _adafactor,
}
"""Factories, by name."""
