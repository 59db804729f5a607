# SPDX-License-Identifier: Apache-2.0
"""Options of param groups in a checkpoint, which natively replace those of the training.

torchtitan's state dicts are flat: ``param_groups.<name of a parameter>.<option>``. Of a group the
first parameter decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torchtitan.tools.logging import logger

from swap_core import StateDictError, UnsupportedOptionError
from swap_torch.adapter import Group
from swap_torch.integrations.torchtitan.implementation import FLAGS, is_at_fault, what_is_on
from swap_torch.optimizer import TorchSwapOptimizer

__all__ = ["with_own_implementation"]


def with_own_implementation(
    optimizers: Sequence[Optimizer], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Keep the implementation of a group where that of the checkpoint cannot swap.

    All other options come from the checkpoint, as natively.

    Returns:
        What to load; ``state_dict`` is not changed.

    Raises:
        StateDictError: other options of the checkpoint cannot be combined with swapping.
    """
    kept: dict[str, Any] = {}
    said: dict[str, None] = {}
    for optimizer, group in _swapping_groups(optimizers):
        saved = _saved_options(group, state_dict)
        if is_at_fault(optimizer._swap.adapter, saved):
            kept.update(_flags_of(group, state_dict))
            said[_what_is_kept(optimizer, group, saved)] = None
            saved |= _own_flags(group)
        _refuse_others(optimizer, saved)
    for line in said:
        logger.warning(line)
    return {**state_dict, **kept} if kept else state_dict


def _swapping_groups(
    optimizers: Sequence[Optimizer],
) -> Iterator[tuple[TorchSwapOptimizer, Group]]:
    for optimizer in optimizers:
        if isinstance(optimizer, TorchSwapOptimizer):
            yield from ((optimizer, group) for group in optimizer.param_groups)


def _saved_options(group: Group, state_dict: Mapping[str, Any]) -> Group:
    """What the group's options would be after loading."""
    saved = {key: value for key, value in group.items() if key != "params"}
    for name in group.get("param_names", ())[:1]:
        for key in saved:
            saved[key] = state_dict.get(f"param_groups.{name}.{key}", saved[key])
    return saved


def _own_flags(group: Group) -> dict[str, Any]:
    return {flag: group[flag] for flag in FLAGS if flag in group}


def _flags_of(group: Group, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The group's flags by their keys in the state dict."""
    keys = {
        f"param_groups.{name}.{flag}": value
        for name in group["param_names"]
        for flag, value in _own_flags(group).items()
    }
    return {key: value for key, value in keys.items() if key in state_dict}


def _what_is_kept(optimizer: Optimizer, group: Group, saved: Group) -> str:
    own = ", ".join(f"{flag}={value}" for flag, value in _own_flags(group).items())
    return (
        f"optimizer.swap_optimizer: the checkpoint says {what_is_on(saved)} for "
        f"{type(optimizer).__name__}, which cannot be combined with swapping; this training goes "
        f"on with its own {own}."
    )


def _refuse_others(optimizer: TorchSwapOptimizer, saved: Group) -> None:
    kind = type(optimizer).__name__
    try:
        optimizer._swap.adapter.validate_group(saved, "a param group of the checkpoint")
    except UnsupportedOptionError as error:
        raise StateDictError(
            f"optimizer.swap_optimizer: the checkpoint has {kind} with options that cannot be "
            f"combined with swapping, and options come from it, as natively. Resume with "
            f"--optimizer.no-swap-optimizer, or without the states: "
            f"--checkpoint.exclude-from-loading optimizer. ({error})"
        ) from error
