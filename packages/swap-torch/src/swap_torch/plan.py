# SPDX-License-Identifier: Apache-2.0
"""The plan of an update: batches, bound copies and bound calls, made once and used many times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import is_
from typing import Any, TypeAlias, final

import torch

from swap_core import (
    Batch,
    Ledger,
    PackedPipeline,
    PerTensorPipeline,
    Pipeline,
    Run,
    SwapOptimizerConfig,
    partition,
    restore_or_explain,
    runs_of,
)
from swap_torch.adapter import Kernel, TorchStep, TorchSwapAdapter, TorchUnit, UpdateCall
from swap_torch.device import AnyTorchDevice, DeviceMemory, Transfer
from swap_torch.sharding import is_sharded, local_gradients, local_of
from swap_torch.states import OptimizerState, StateTable, SwappedState

__all__ = ["Lane", "Plan", "Planner"]

TorchBatch: TypeAlias = Batch[Any, DeviceMemory, Transfer]
TorchPipeline: TypeAlias = Pipeline[Any, Any, DeviceMemory, Transfer]


@dataclass(frozen=True, slots=True)
class Lane:
    """What runs through one device."""

    device: AnyTorchDevice
    pipeline: TorchPipeline
    batches: tuple[TorchBatch, ...]
    calls: tuple[tuple[UpdateCall, ...], ...]
    """For each batch, the calls that update it."""
    ring: int
    """A load waits for the store of the batch this many before it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An update of certain parameters, with what must still be true for it to fit."""

    group_params: tuple[tuple[torch.Tensor, ...], ...]
    """All parameters of each group, with gradient or without."""
    active: tuple[torch.Tensor, ...]
    """Those with a gradient."""
    locals: tuple[torch.Tensor, ...]
    """Their local tensors, if any of them is sharded; else empty."""
    entries: tuple[dict[str, Any], ...]
    """``optimizer.state[param]`` of each."""
    values: tuple[Any, ...]
    """All values in ``entries``, in order."""
    staying: tuple[UpdateCall, ...]
    """Updates that need no swapped state."""
    lanes: tuple[Lane, ...]

    def fits(self, step: TorchStep, state: OptimizerState) -> bool:
        """Tell whether parameters, shards and states are the very objects that were planned."""
        return (
            self.has_parameters_of(step)
            and _same(
                [local_of(param) for param in self.active] if self.locals else (), self.locals
            )
            and _same(list(map(state.get, self.active)), self.entries)
            and _same([value for entry in self.entries for value in entry.values()], self.values)
        )

    def has_parameters_of(self, step: TorchStep) -> bool:
        """Tell whether the optimizer's parameters are the very objects that were planned."""
        return len(step.params) == len(self.group_params) and all(
            map(_same, step.params, self.group_params)
        )

    def localize(self, step: TorchStep) -> None:
        """Replace the step's gradients by local ones with their parameters' placement."""
        if self.locals:
            step.grads = local_gradients(self.active, step.grads)


def _same(found: Sequence[object], planned: Sequence[object]) -> bool:
    return len(found) == len(planned) and all(map(is_, found, planned))


@final
class Planner:
    """Makes plans for one optimizer, and owns the device memory that they share.

    Args:
        adapter: Knows the optimizer's kernels and states.
        table: Knows where states are. It must have admitted all parameters of a step.
        config: Says how to swap.
        packed: Whether through arenas, or state by state.
        ledger: Where everything is counted.
    """

    def __init__(
        self,
        adapter: TorchSwapAdapter,
        table: StateTable,
        config: SwapOptimizerConfig,
        *,
        packed: bool,
        ledger: Ledger,
    ) -> None:
        self._adapter = adapter
        self._table = table
        self._config = config
        self._packed = packed
        self._ledger = ledger
        self._arenas: dict[torch.device, list[torch.UntypedStorage]] = {}
        self._shells: dict[torch.Tensor, tuple[torch.Tensor, Transfer]] = {}

    def build(self, step: TorchStep, state: OptimizerState) -> Plan:
        """Plan the update of the parameters that have a gradient in ``step``."""
        units = [
            replace(unit, slots=tuple(s.slot for s in self._table.swapped(unit.param).values()))
            for unit in self._adapter.iter_update_units(step)
        ]
        kernels = self._kernels(units)
        active = tuple(unit.param for unit in units)
        entries = tuple(state[param] for param in active)
        lanes = [
            self._lane(device, members, kernels, state) for device, members in self._split(units)
        ]
        self._ledger.plans_built += 1
        return Plan(
            group_params=tuple(tuple(members) for members in step.params),
            active=active,
            locals=tuple(map(local_of, active)) if any(map(is_sharded, active)) else (),
            entries=entries,
            values=tuple(value for entry in entries for value in entry.values()),
            staying=tuple(
                self._calls([unit for unit in units if not unit.slots], kernels, state, {})
            ),
            lanes=tuple(lanes),
        )

    def forget(self) -> None:
        """Let go of device memory that belongs to states which may be gone."""
        self._shells.clear()

    def _kernels(self, units: Sequence[TorchUnit]) -> dict[int, Kernel]:
        groups = self._adapter.optimizer.param_groups
        return {
            index: self._adapter.kernel(groups[index], [unit.param for unit in members])
            for index, members in _by_group(units)
        }

    def _split(self, units: Sequence[TorchUnit]) -> list[tuple[AnyTorchDevice, list[TorchUnit]]]:
        lanes: dict[torch.device, tuple[AnyTorchDevice, list[TorchUnit]]] = {}
        for unit in units:
            if unit.slots:
                device = next(iter(self._table.swapped(unit.param).values())).device
                lanes.setdefault(device.torch_device, (device, []))[1].append(unit)
        return list(lanes.values())

    def _calls(
        self,
        units: Sequence[TorchUnit],
        kernels: dict[int, Kernel],
        state: OptimizerState,
        on_device: dict[torch.Tensor, torch.Tensor],
    ) -> Iterator[UpdateCall]:
        """Bind one call per group. ``on_device`` maps what ``state`` shows to what is computed."""
        groups = self._adapter.optimizer.param_groups
        for index, members in _by_group(units):
            keys = (*self._adapter.counter_keys(), *self._adapter.state_keys(groups[index]))
            positions = tuple(unit.grad_index for unit in members)
            first, last = positions[0], positions[-1] + 1
            contiguous = positions == tuple(range(first, last))
            yield UpdateCall(
                group_index=index,
                params=[local_of(unit.param) for unit in members],
                grads=slice(first, last) if contiguous else positions,
                states={
                    key: [
                        on_device.get(shown, local_of(shown))
                        for shown in (state[unit.param][key] for unit in members)
                    ]
                    for key in keys
                },
                kernel=kernels[index],
            )

    # Lanes.

    def _lane(
        self,
        device: AnyTorchDevice,
        units: list[TorchUnit],
        kernels: dict[int, Kernel],
        state: OptimizerState,
    ) -> Lane:
        sizes, joined = _sizes(units)
        parts = partition(sizes, self._config.swap_times, joined=joined)
        members = [[units[i] for i in part] for part in parts]
        states = [self._states(part) for part in members]
        bind = self._bind_packed if self._packed else self._bind_per_tensor
        pipeline, batches, bound, ring = bind(device, states)
        calls = tuple(
            tuple(self._calls(part, kernels, state, on_device))
            for part, on_device in zip(members, bound, strict=True)
        )
        return Lane(device, pipeline, batches, calls, ring)

    def _states(self, units: Sequence[TorchUnit]) -> list[SwappedState]:
        """The states that a batch moves: each once, however often its parameter is listed."""
        params = dict.fromkeys(unit.param for unit in units)
        return [state for param in params for state in self._table.swapped(param).values()]

    def _batch(
        self,
        device: AnyTorchDevice,
        index: int,
        nbytes: int,
        memory: DeviceMemory,
        transfers: tuple[Transfer, ...],
    ) -> TorchBatch:
        return Batch(
            index=index,
            nbytes=nbytes,
            memory=memory,
            transfers=transfers,
            restored=device.create_event(),
            loaded=device.create_event(),
            updated=device.create_event(),
            stored=device.create_event(),
        )

    def _bind_packed(
        self, device: AnyTorchDevice, states: Sequence[Sequence[SwappedState]]
    ) -> _Bound:
        """Lay each batch out in its arena."""
        runs = [runs_of([s.slot.span for s in batch]) for batch in states]
        nbytes = [sum(run.span.nbytes for run in batch) for batch in runs]
        ring = min(self._config.staging_buffers, len(states))
        memories = self._arena_memories(device, [max(nbytes[i::ring]) for i in range(ring)])
        batches: list[TorchBatch] = []
        bound: list[dict[torch.Tensor, torch.Tensor]] = []
        for index, batch in enumerate(states):
            memory = memories[index % ring]
            # Views of a storage can only be made while it has its bytes.
            restore_or_explain(device, memory, f"staging arena {index % ring}")
            try:
                transfers = tuple(self._run_transfer(device, memory, run) for run in runs[index])
                bound.append(self._arena_views(device, memory, batch))
            finally:
                device.release(memory)
            batches.append(self._batch(device, index, nbytes[index], memory, transfers))
        arenas = [(memory, memory.sizes[0]) for memory in memories]
        return PackedPipeline(device, self._ledger, arenas), tuple(batches), bound, ring

    def _arena_memories(self, device: AnyTorchDevice, sizes: Sequence[int]) -> list[DeviceMemory]:
        arenas = self._arenas.setdefault(device.torch_device, [])
        while len(arenas) < len(sizes):
            arenas.append(_new_storage(device))
        return [
            DeviceMemory((arena,), (nbytes,)) for arena, nbytes in zip(arenas, sizes, strict=False)
        ]

    def _run_transfer(self, device: AnyTorchDevice, memory: DeviceMemory, run: Run) -> Transfer:
        storage = memory.storages[0]
        nbytes = run.span.nbytes
        on_device = self._view(device, storage, torch.uint8, run.arena_offset, (nbytes,), (1,))
        return Transfer(on_device, self._table.pool(device).bytes_at(run.span))

    def _arena_views(
        self, device: AnyTorchDevice, memory: DeviceMemory, batch: Sequence[SwappedState]
    ) -> dict[torch.Tensor, torch.Tensor]:
        views: dict[torch.Tensor, torch.Tensor] = {}
        offset = 0
        for state in batch:
            host = state.host
            views[state.visible] = self._view(
                device, memory.storages[0], host.dtype, offset, host.shape, host.stride()
            )
            offset += state.slot.span.nbytes
        return views

    def _bind_per_tensor(
        self, device: AnyTorchDevice, states: Sequence[Sequence[SwappedState]]
    ) -> _Bound:
        """Give each state its own storage."""
        batches: list[TorchBatch] = []
        bound: list[dict[torch.Tensor, torch.Tensor]] = []
        for index, batch in enumerate(states):
            shells = [self._shell(device, state) for state in batch]
            memory = DeviceMemory(
                tuple(shell.untyped_storage() for shell, _ in shells),
                tuple(state.slot.nbytes for state in batch),
            )
            transfers = tuple(transfer for _, transfer in shells)
            batches.append(self._batch(device, index, sum(memory.sizes), memory, transfers))
            bound.append(
                {state.visible: shell for state, (shell, _) in zip(batch, shells, strict=True)}
            )
        return PerTensorPipeline(device, self._ledger), tuple(batches), bound, 2

    def _shell(self, device: AnyTorchDevice, state: SwappedState) -> tuple[torch.Tensor, Transfer]:
        """The device tensor of a state, without bytes, and the copy between it and the host."""
        known = self._shells.get(state.visible)
        if known is not None:
            return known
        host, nbytes = state.host, state.slot.nbytes
        storage = _new_storage(device)
        memory = DeviceMemory((storage,), (nbytes,))
        restore_or_explain(device, memory, f"{state.slot.key} of {state.slot.owner}")
        try:
            shell = self._view(device, storage, host.dtype, 0, host.shape, host.stride())
            flat = self._view(device, storage, torch.uint8, 0, (nbytes,), (1,))
        finally:
            device.release(memory)
        source = self._table.pool(device).bytes_at(state.slot.span)[:nbytes]
        self._shells[state.visible] = shell, Transfer(flat, source)
        return self._shells[state.visible]

    def _view(
        self,
        device: AnyTorchDevice,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        offset: int,
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> torch.Tensor:
        """A tensor over ``storage`` from byte ``offset``."""
        self._ledger.views_made += 1
        view = torch.empty(0, dtype=dtype, device=device.torch_device)
        return view.set_(storage, offset // dtype.itemsize, shape, stride)


_Bound: TypeAlias = tuple[
    TorchPipeline,
    tuple[TorchBatch, ...],
    list[dict[torch.Tensor, torch.Tensor]],
    int,
]
"""The pipeline, its batches, for each batch the device tensor of each shown state, the ring."""


def _new_storage(device: AnyTorchDevice) -> torch.UntypedStorage:
    # uint8, so that every size is a multiple of the item size: torch_npu checks that only after
    # it has replaced the storage.
    return torch.empty(0, dtype=torch.uint8, device=device.torch_device).untyped_storage()


def _by_group(units: Sequence[TorchUnit]) -> Iterator[tuple[int, list[TorchUnit]]]:
    for index, members in groupby(units, lambda unit: unit.adapter_index):
        yield index, list(members)


def _sizes(units: Sequence[TorchUnit]) -> tuple[list[int], set[int]]:
    """Bytes that each unit adds to its batch, and the units that must follow into a batch.

    torch accepts a parameter that is listed twice in a group (with a warning) and updates it
    twice. Both updates need its states, so everything between the two goes into one batch.
    """
    first: dict[torch.Tensor, int] = {}
    sizes: list[int] = []
    joined: set[int] = set()
    for position, unit in enumerate(units):
        earlier = first.setdefault(unit.param, position)
        sizes.append(unit.nbytes if earlier == position else 0)
        joined.update(range(earlier + 1, position + 1))
    return sizes, joined
