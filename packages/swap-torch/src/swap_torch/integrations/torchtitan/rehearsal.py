# SPDX-License-Identifier: Apache-2.0
"""Ask swap_torch about the optimizers of a config before a model exists.

Models are built for minutes on all ranks before their optimizers are. So each group's optimizer is
built on one element while the command line is read, and whatever swap_torch refuses, it refuses
then: kinds of optimizers, options, names of states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from swap_core import SwapOptimizerConfig, find_adapter

__all__ = ["rehearse"]


def rehearse(config: OptimizersContainer.Config, options: SwapOptimizerConfig) -> None:
    """Raise what wrapping the optimizers of ``config`` would raise.

    Raises:
        ValueError: naming the param group, what was found, and what to use instead.
    """
    for group in config.param_groups:
        optimizer = _build(config, group)
        if optimizer is None:
            continue
        try:
            adapter: Any = find_adapter(optimizer, "torch")
            adapter(optimizer).validate(options)
        except ValueError as error:
            raise type(error)(
                f"optimizer.swap_optimizer: optimizer.param_groups {group.pattern!r}, which is "
                f"{group.optimizer_name} with optimizer.implementation={config.implementation!r}: "
                f"{error}"
            ) from error


def _build(config: OptimizersContainer.Config, group: ParamGroupConfig) -> Optimizer | None:
    """The optimizer of one group, on one element; None if that takes a model."""
    try:
        factory = config._owner._resolve_optimizer_factory(group.optimizer_name)
    except NotImplementedError:
        return None  # a container that builds it elsewhere, or that will say so itself
    if not (isinstance(factory, type) and issubclass(factory, Optimizer)):
        return None
    if config.optimizer_factory_kwargs_by_name.get(group.optimizer_name):
        return None  # made for the parameters that there will be
    implementation = config._owner._build_impl_kwargs(config)
    # A matrix, since some optimizers take nothing else.
    members = {"params": [torch.zeros(1, 1)], **implementation, **group.optimizer_kwargs}
    optimizer: Optimizer = factory([members])  # type: ignore[call-arg]  # kinds have defaults
    return optimizer
