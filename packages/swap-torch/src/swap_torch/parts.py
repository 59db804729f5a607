# SPDX-License-Identifier: Apache-2.0
"""A part of an optimizer: some parameters of one group, and where their states are.

For optimizers whose own ``step`` runs on each batch (:mod:`swap_torch.per_parameter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swap_torch.adapter import Kernel, TorchSwapAdapter, TorchUnit, UpdateCall
from swap_torch.forms import Form, copy_values
from swap_torch.selection import OptimizerState
from swap_torch.sharding import is_sharded, largest_shard, local_of, wrap_like
from swap_torch.states import StateTable
from swap_torch.swapped import SwappedState

__all__ = ["Member", "PartCall", "Place", "calls_of_parts", "part_sizes"]


@dataclass(frozen=True, slots=True)
class Place:
    """A state that swaps, or that will once the optimizer has made it."""

    home: SwappedState
    view: torch.Tensor
    """Its local device tensor, valid while the batch is on the device."""
    value: torch.Tensor | None
    """What the optimizer is to see of it: ``view``, wrapped; None before it was made."""

    def take(self, made: object) -> object:
        """Take over what the optimizer put in the state's place.

        Returns:
            What ``optimizer.state`` is to show: host memory, or ``made`` itself if that is of
            another dtype, shape or kind. (The next update then brings it to other host memory.)
        """
        if not isinstance(made, torch.Tensor) or not self._holds(local_of(made)):
            return made
        copy_values(self.view, local_of(made))
        shown = self.home.shown
        return self.home.show(made, state_exists=True) if shown is None else shown

    def _holds(self, local: torch.Tensor) -> bool:
        dense = local.layout is torch.strided
        return dense and Form(local) == self.home.form


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a part."""

    param: torch.Tensor
    places: Mapping[str, Place]

    def given(self, state: OptimizerState) -> dict[str, Any] | None:
        """Its entry as the optimizer is to see it: values of ``state``, on the device."""
        entry = state.get(self.param)
        if entry is None:
            return None
        seen = {key: place.value for key, place in self.places.items() if place.value is not None}
        return {key: seen.get(key, value) for key, value in entry.items()}


@dataclass(frozen=True, slots=True)
class PartCall(UpdateCall):
    """One call of the optimizer's own ``step``, on a part of it."""

    members: tuple[Member, ...] = field(default=())
    """The parameters of the part; one that is listed twice is there twice."""


def calls_of_parts(
    by_group: Iterable[tuple[int, Sequence[TorchUnit]]],
    kernels: Mapping[int, Kernel],
    table: StateTable,
    views: Mapping[SwappedState, torch.Tensor],
) -> Iterator[PartCall]:
    """Bind one call per group.

    Args:
        by_group: Groups by number, with the units to be updated, in order.
        kernels: What native would run, by group.
        table: Knows the homes of states.
        views: Device tensors of the states that move with these units.
    """
    for index, units in by_group:
        members = tuple(_member(unit.param, table, views) for unit in units)
        params = [member.param for member in members]
        positions = tuple(unit.grad_index for unit in units)
        keys = dict.fromkeys(key for member in members for key in member.places)
        yield PartCall(
            group_index=index,
            params=params,
            grads=positions,
            states={key: [m.places[key].view for m in members if key in m.places] for key in keys},
            kernel=kernels[index],
            uniform=False,
            counters=None,
            members=members,
        )


def _member(
    param: torch.Tensor, table: StateTable, views: Mapping[SwappedState, torch.Tensor]
) -> Member:
    homes = table.swapped(param)
    places = {key: _place(home, views[home]) for key, home in homes.items() if home in views}
    return Member(param, places)


def _place(home: SwappedState, view: torch.Tensor) -> Place:
    shown = home.shown
    value = None if shown is None else wrap_like(shown, view, state_exists=True)
    return Place(home, view, value)


def part_sizes(
    adapter: TorchSwapAdapter, units: Sequence[TorchUnit], sizes: Sequence[int]
) -> list[int]:
    """Sizes by which units are cut into parts: the same in every process.

    Native code may communicate within a call, once for a whole list of tensors; so every process
    must make the same calls, although shards differ in size, and budgets may.

    Args:
        adapter: Knows how many states a parameter has.
        units: In order.
        sizes: Bytes that each of them moves in this process.
    """
    if not any(is_sharded(unit.param) for unit in units):
        return list(sizes)  # nobody communicates
    groups = adapter.optimizer.param_groups
    return [
        largest_shard(unit.param).numel()
        * unit.param.element_size()
        * len(adapter.param_keys(unit.param, groups[unit.adapter_index]))
        for unit in units
    ]
