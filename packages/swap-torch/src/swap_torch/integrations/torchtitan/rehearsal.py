# SPDX-License-Identifier: Apache-2.0
"""Ask swap_torch about the optimizers of a config before a model exists.

Models are built for minutes on all ranks before their optimizers are. So each group's optimizer is
built on one element while the command line is read, and whatever swap_torch refuses, it refuses
then: kinds of optimizers, options, names of states.
"""

from __future__ import annotations

import copy

import torch
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from swap_core import SwapOptimizerConfig, UnsupportedOptimizerError, UnsupportedOptionError
from swap_torch.finding import find_torch_adapter
from swap_torch.integrations.torchtitan.implementation import (
    FLAGS,
    NAMES,
    is_at_fault,
    refuses,
    what_is_on,
)
from swap_torch.integrations.torchtitan.shares import refuse_options, share_of

__all__ = ["rehearse", "stand_ins"]


def rehearse(config: OptimizersContainer.Config, options: SwapOptimizerConfig) -> None:
    """Raise what wrapping the optimizers of ``config`` would raise.

    Raises:
        ValueError: naming the param group, what was found, and what to use instead.
    """
    made = [(group, _build(config, group)) for group in config.param_groups]
    for group, optimizer in made:
        if optimizer is not None:
            _rehearse(config, group, optimizer, options)
    known = [optimizer for _, optimizer in made if optimizer is not None]
    # What others have is not known yet; the container asks again.
    if len(known) == len(made):
        refuse_options(options, known)


def stand_ins(config: OptimizersContainer.Config) -> list[Optimizer]:
    """The optimizers on one element, of those groups that can be built without a model."""
    made = (_build(config, group) for group in config.param_groups)
    return [optimizer for optimizer in made if optimizer is not None]


def _rehearse(
    config: OptimizersContainer.Config,
    group: ParamGroupConfig,
    optimizer: Optimizer,
    options: SwapOptimizerConfig,
) -> None:
    where = (
        f"optimizer.swap_optimizer: optimizer.param_groups {group.pattern!r}, which is "
        f"{group.optimizer_name} with optimizer.implementation={config.implementation!r}: "
    )
    try:
        share = share_of(options, optimizer)
        if share is not None:
            find_torch_adapter(optimizer)(optimizer).validate(share)
    except UnsupportedOptionError as error:
        told = _about_implementation(config, group, optimizer) or str(error)
        raise UnsupportedOptionError(where + told) from error
    except ValueError as error:
        raise type(error)(f"{where}{error}") from error


def _about_implementation(
    config: OptimizersContainer.Config, group: ParamGroupConfig, optimizer: Optimizer
) -> str:
    """What to set in torchtitan, if the implementation is why ``optimizer`` cannot swap."""
    (found,) = optimizer.param_groups
    if not is_at_fault(find_torch_adapter(optimizer)(optimizer), found):
        return ""
    own = ", ".join(f"{flag!r}: False" for flag in FLAGS if found.get(flag))
    instead = [f"set {own} in its optimizer_kwargs"]
    by_config = not any(group.optimizer_kwargs.get(flag) for flag in FLAGS)
    names = [name for name in NAMES if by_config and _all_can_swap(config, name)]
    if names:
        instead.insert(0, f"give --optimizer.implementation {' or '.join(names)}")
    return f"{what_is_on(found)} is not supported; {', or '.join(instead)}."


def _all_can_swap(config: OptimizersContainer.Config, implementation: str) -> bool:
    """Tell whether no group would be refused with another implementation."""
    other = copy.copy(config)
    other.implementation = implementation
    return all(map(_can_swap, stand_ins(other)))


def _can_swap(optimizer: Optimizer) -> bool:
    try:
        adapter = find_torch_adapter(optimizer)(optimizer)
    except UnsupportedOptimizerError:
        return False
    return not any(refuses(adapter, group) for group in optimizer.param_groups)


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
