# SPDX-License-Identifier: Apache-2.0
"""Shares: what of the options, which are for all optimizers of a config, each of them gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from swap_core import SwapOptimizerConfig, UnknownStateKeyError, UnsupportedOptionError
from swap_torch.adapter import TorchSwapAdapter
from swap_torch.finding import find_torch_adapter
from swap_torch.integrations.torchtitan.implementation import is_at_fault, what_is_on

__all__ = ["refuse_options", "share_of"]


def share_of(options: SwapOptimizerConfig, optimizer: Optimizer) -> SwapOptimizerConfig | None:
    """Leave out the states that ``optimizer`` does not have, and an order that it may not take.

    Returns:
        None if none of its states is named, so that nothing of it swaps.

    Raises:
        UnsupportedOptimizerError: there is no adapter for it.
    """
    adapter = find_torch_adapter(optimizer)(optimizer)
    if options.state_keys is not None:
        have = _names_of_states(adapter)
        own = tuple(key for key in options.state_keys if key in have)
        if not own:
            return None
        options = replace(options, state_keys=own)
    if options.zigzag and _refuses(adapter, options):
        options = replace(options, zigzag=False)
    return options


def refuse_options(options: SwapOptimizerConfig, optimizers: Sequence[Optimizer]) -> None:
    """Refuse options that are for none of ``optimizers``, and any of these that cannot swap.

    Raises:
        ValueError: naming the field or option, what was found, and what is accepted.
    """
    shares = [share_of(options, optimizer) for optimizer in optimizers]
    for optimizer, share in zip(optimizers, shares, strict=True):
        if share is not None:
            _validate(optimizer, share)
    _refuse_keys(options, optimizers)
    if options.zigzag and not any(share.zigzag for share in shares if share is not None):
        raise UnsupportedOptionError(
            f"optimizer.swap_optimizer_zigzag=True changes the order of updates, which no "
            f"optimizer of this config ({', '.join(_kinds(optimizers))}) may; leave "
            f"--optimizer.swap-optimizer-zigzag out."
        )


def _validate(optimizer: Optimizer, share: SwapOptimizerConfig) -> None:
    adapter = find_torch_adapter(optimizer)(optimizer)
    for group in optimizer.param_groups:
        if is_at_fault(adapter, group):
            raise UnsupportedOptionError(
                f"optimizer.swap_optimizer: this config builds {type(optimizer).__name__} with "
                f"{what_is_on(group)}, which is not supported; give another "
                f"--optimizer.implementation, or set it to False in optimizer_kwargs of its group."
            )
    adapter.validate(share)


def _refuse_keys(options: SwapOptimizerConfig, optimizers: Iterable[Optimizer]) -> None:
    have: dict[str, dict[str, None]] = {}
    for optimizer in optimizers:
        names = _names_of_states(find_torch_adapter(optimizer)(optimizer))
        have.setdefault(type(optimizer).__name__, {}).update(dict.fromkeys(names))
    listed = ", ".join(f"{', '.join(names)} ({kind})" for kind, names in have.items() if names)
    for key in options.state_keys or ():
        if not any(key in names for names in have.values()):
            raise UnknownStateKeyError(
                f"optimizer.swap_optimizer_state_keys names {key!r}, which no optimizer of this "
                f"config has; give some of {listed or 'nothing: they have no states'}, or None for "
                f"all."
            )


def _names_of_states(adapter: TorchSwapAdapter) -> tuple[str, ...]:
    groups = adapter.optimizer.param_groups
    return tuple(dict.fromkeys(key for group in groups for key in adapter.state_keys(group)))


def _refuses(adapter: TorchSwapAdapter, options: SwapOptimizerConfig) -> bool:
    try:
        adapter.validate(options)
    except UnsupportedOptionError:
        return True
    return False


def _kinds(optimizers: Iterable[Optimizer]) -> list[str]:
    return list(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
