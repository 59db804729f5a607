# SPDX-License-Identifier: Apache-2.0
"""Makes plans: cuts parameters into batches and binds the calls that update them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import final

import torch

from swap_core import Ledger, SwapOptimizerConfig, partition, update_order
from swap_torch.adapter import (
    ActiveGroup,
    Kernel,
    TorchStep,
    TorchSwapAdapter,
    TorchUnit,
    UpdateCall,
)
from swap_torch.device import AnyTorchDevice
from swap_torch.parts import calls_of_parts, part_sizes
from swap_torch.plan import Lane, Plan, tensors_in
from swap_torch.selection import OptimizerState
from swap_torch.sharding import is_sharded, local_of
from swap_torch.staging import PackedStaging, PerTensorStaging, Staging
from swap_torch.states import StateTable
from swap_torch.swapped import SwappedState
from swap_torch.ties import tied_units

__all__ = ["Planner"]


@final
class Planner:
    """Makes plans for one optimizer.

    Args:
        adapter: Knows the optimizer's kernels and states.
        table: Knows where states are. It must have admitted all parameters of a step.
        config: Says how to swap.
        ledger: Where everything is counted.
    """

    def __init__(
        self,
        adapter: TorchSwapAdapter,
        table: StateTable,
        config: SwapOptimizerConfig,
        ledger: Ledger,
    ) -> None:
        self._adapter = adapter
        self._table = table
        self._config = config
        self._ledger = ledger
        self._stagings: dict[torch.device, Staging] = {}

    @property
    def packed(self) -> bool:
        """Whether states move through arenas. torch optimizers do by default."""
        return self._config.packed_swap is not False

    def build(self, step: TorchStep, state: OptimizerState) -> Plan:
        """Plan the update of the parameters that have a gradient in ``step``.

        Raises:
            torch.OutOfMemoryError: see :meth:`Staging.bind`.
        """
        units = [
            replace(unit, slots=tuple(s.slot for s in self._table.swapped(unit.param).values()))
            for unit in self._adapter.iter_update_units(step)
        ]
        kernels = self._kernels(units)
        active = tuple(unit.param for unit in units)
        tied = tied_units(units)
        moving, staying = self._divide(units, tied)
        lanes = [self._lane(members, tied, kernels, state) for members in self._by_device(moving)]
        self._ledger.plans_built += 1
        itself = self._adapter.steps_itself
        entries = tuple(state.get(param) if itself else state[param] for param in active)
        values = (value for entry in entries if entry is not None for value in entry.values())
        return Plan(
            group_params=tuple(tuple(members) for members in step.params),
            active=active,
            groups=tuple(
                ActiveGroup(index, kernels[index], _places(members))
                for index, members in _by_group(units)
            ),
            # An optimizer's own step takes whole parameters and gradients as they are.
            locals=tuple(map(local_of, active))
            if any(map(is_sharded, active)) and not itself
            else (),
            entries=entries,
            values=tuple(tensors_in(entries) if itself else values),
            staying=tuple(self._staying_calls(staying, tied, kernels, state)),
            lanes=tuple(lanes),
            tensors_only=itself,
        )

    def _divide(
        self, units: Sequence[TorchUnit], tied: Mapping[int, int]
    ) -> tuple[list[TorchUnit], list[TorchUnit]]:
        """Units that are updated in batches, and those that are updated beside them."""
        if self._adapter.steps_itself:
            # Updates of shards may communicate, so their order is the same in every process,
            # although what swaps is not (a shard may be small, or empty): all are in batches.
            with_states = {local_of(unit.param).device for unit in units if unit.slots}
            moves = [local_of(unit.param).device in with_states for unit in units]
        else:
            moving = {tied[unit.grad_index] for unit in units if unit.slots}
            moves = [tied[unit.grad_index] in moving for unit in units]
        pairs = list(zip(units, moves, strict=True))
        return [unit for unit, yes in pairs if yes], [unit for unit, yes in pairs if not yes]

    def _staying_calls(
        self,
        units: Sequence[TorchUnit],
        tied: Mapping[int, int],
        kernels: Mapping[int, Kernel],
        state: OptimizerState,
    ) -> Iterator[UpdateCall]:
        for part in self._parts(units, tied) if self._adapter.steps_itself else [units]:
            yield from self._calls(part, kernels, state, {})

    def _parts(
        self, units: Sequence[TorchUnit], tied: Mapping[int, int]
    ) -> list[Sequence[TorchUnit]]:
        """Cut units into batches."""
        sizes, joined = _sizes(units, tied)
        if self._adapter.steps_itself:
            sizes = part_sizes(self._adapter, units, sizes)
        parts = partition(sizes, self._config.swap_times, joined=joined)
        return [[units[i] for i in part] for part in parts]

    def _in_update_order(
        self, parts: Sequence[Sequence[TorchUnit]], state: OptimizerState
    ) -> list[Sequence[TorchUnit]]:
        """Batches in the order in which they are updated, where that is free.

        It is not where updates follow the backward pass, where an optimizer's own step may draw
        random numbers or communicate, parameter after parameter, and where two parameters were
        given one state. Per tensor the order of parameters needs the least memory: that of two
        neighbours.
        """
        ahead = self._config.prefetch == "backward" or self._config.overlap_backward
        if ahead or self._adapter.steps_itself or not self.packed:
            return list(parts)
        if self._table.selection.share_memory(state):
            return list(parts)
        sizes = [sum(state.slot.span.nbytes for state in self._states(part)) for part in parts]
        return [parts[position] for position in update_order(sizes)]

    def forget(self) -> None:
        """Let go of device tensors of parameters that may have left the optimizer."""
        self._stagings.clear()

    def _kernels(self, units: Sequence[TorchUnit]) -> dict[int, Kernel]:
        groups = self._adapter.optimizer.param_groups
        return {
            index: self._adapter.kernel(groups[index], [unit.param for unit in members])
            for index, members in _by_group(units)
        }

    def _by_device(self, units: Sequence[TorchUnit]) -> list[list[TorchUnit]]:
        """Units by device, in order; those that move nothing are tied to others on theirs."""
        lanes: dict[torch.device, list[TorchUnit]] = {}
        for unit in units:
            lanes.setdefault(local_of(unit.param).device, []).append(unit)
        return list(lanes.values())

    def _lane(
        self,
        units: Sequence[TorchUnit],
        tied: Mapping[int, int],
        kernels: Mapping[int, Kernel],
        state: OptimizerState,
    ) -> Lane:
        device = self._states(units)[0].device
        batches = self._in_update_order(self._parts(units, tied), state)
        states = [self._states(batch) for batch in batches]
        bound = self._staging(device).bind(states)
        calls = tuple(
            tuple(self._calls(batch, kernels, state, dict(zip(moved, views, strict=True))))
            for batch, moved, views in zip(batches, states, bound.on_device, strict=True)
        )
        shown = tuple(
            tuple(shown for state in moved if (shown := state.shown) is not None)
            for moved in states
        )
        return Lane(device, bound.pipeline, bound.batches, calls, shown, bound.ring)

    def _states(self, units: Sequence[TorchUnit]) -> list[SwappedState]:
        """The states that a batch moves: each once, however often its parameter is listed."""
        params = dict.fromkeys(unit.param for unit in units)
        return [state for param in params for state in self._table.swapped(param).values()]

    def _staging(self, device: AnyTorchDevice) -> Staging:
        key = device.torch_device
        if key not in self._stagings:
            pool = self._table.homes.pool(device)
            self._stagings[key] = (
                PackedStaging(device, pool, self._ledger, self._config.staging_buffers)
                if self.packed
                else PerTensorStaging(device, pool, self._ledger)
            )
        return self._stagings[key]

    def _calls(
        self,
        units: Sequence[TorchUnit],
        kernels: Mapping[int, Kernel],
        state: OptimizerState,
        views: Mapping[SwappedState, torch.Tensor],
    ) -> Iterator[UpdateCall]:
        """Bind one call per group. ``views`` has the device tensors of states that move."""
        if self._adapter.steps_itself:
            yield from calls_of_parts(_by_group(units), kernels, self._table, views)
            return
        groups = self._adapter.optimizer.param_groups
        on_device = _by_shown(views)
        for index, members in _by_group(units):
            counters = self._adapter.counter_keys()
            keys = (*counters, *self._adapter.state_keys(groups[index]))
            shown = {key: [state[unit.param][key] for unit in members] for key in keys}
            params = [local_of(unit.param) for unit in members]
            yield UpdateCall(
                group_index=index,
                params=params,
                grads=_positions(members),
                states={
                    key: [on_device.get(tensor, local_of(tensor)) for tensor in tensors]
                    for key, tensors in shown.items()
                },
                kernel=kernels[index],
                uniform=len({(param.device, param.dtype) for param in params}) == 1
                and all(map(_is_float, chain.from_iterable(shown[key] for key in counters))),
                counters=self._row(*[shown[key] for key in counters]),
            )

    def _row(self, *counters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """One tensor over the counters, for optimizers with one counter per parameter."""
        return self._table.counters.row_of(counters[0]) if len(counters) == 1 else None


def _is_float(counter: object) -> bool:
    return isinstance(counter, torch.Tensor) and counter.is_floating_point()


def _places(group: Sequence[TorchUnit]) -> slice:
    """Where the gradients of all units of a group are."""
    return slice(group[0].grad_index, group[-1].grad_index + 1)


def _positions(units: Sequence[TorchUnit]) -> slice | tuple[int, ...]:
    """Where the gradients of ``units`` are: a slice if they follow each other."""
    positions = tuple(unit.grad_index for unit in units)
    whole = range(positions[0], positions[-1] + 1)
    return slice(whole.start, whole.stop) if positions == tuple(whole) else positions


def _by_group(units: Sequence[TorchUnit]) -> Iterator[tuple[int, list[TorchUnit]]]:
    for index, members in groupby(units, lambda unit: unit.adapter_index):
        yield index, list(members)


def _by_shown(views: Mapping[SwappedState, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """From what ``optimizer.state`` shows of each state to its device tensor."""
    pairs = ((state.shown, view) for state, view in views.items())
    return {shown: view for shown, view in pairs if shown is not None}


def _sizes(units: Sequence[TorchUnit], tied: Mapping[int, int]) -> tuple[list[int], set[int]]:
    """Bytes that each unit adds to its batch, and the units that must follow into a batch.

    Units whose parameters share memory are in one batch, and everything between them.
    """
    seen: set[torch.Tensor] = set()
    sizes: list[int] = []
    joined: set[int] = set()
    first: dict[int, int] = {}
    for position, unit in enumerate(units):
        # torch accepts a parameter that is listed twice (with a warning) and updates it twice.
        sizes.append(0 if unit.param in seen else unit.nbytes)
        seen.add(unit.param)
        earlier = first.setdefault(tied[unit.grad_index], position)
        joined.update(range(earlier + 1, position + 1))
    return sizes, joined
