# SPDX-License-Identifier: Apache-2.0
"""Device memory of the two pipelines, and the tensors over it that copies and updates use.

Memory exists only during an update. Views of a storage survive its being resized to nothing and
back, but can be made only while it has its bytes; so they are made once, when a plan is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch

from swap_core import (
    Batch,
    Ledger,
    PackedPipeline,
    PerTensorPipeline,
    Run,
    restore_or_explain,
    runs_of,
)
from swap_torch.device import AnyTorchDevice, DeviceMemory, Transfer
from swap_torch.host import HostPool
from swap_torch.plan import TorchBatch, TorchPipeline
from swap_torch.swapped import SwappedState

__all__ = ["Bound", "PackedStaging", "PerTensorStaging", "Staging"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Batches that are ready to run."""

    pipeline: TorchPipeline
    batches: tuple[TorchBatch, ...]
    on_device: tuple[list[torch.Tensor], ...]
    """For each batch, the device tensor of each state, in the order given."""
    ring: int
    """A load waits for the store of the batch this many before it."""


class Staging(ABC):
    """Device memory for the states of one device.

    Args:
        device: The verbs.
        pool: The host memory of the states.
        ledger: Where views are counted.
    """

    def __init__(self, device: AnyTorchDevice, pool: HostPool, ledger: Ledger) -> None:
        self._device = device
        self._pool = pool
        self._ledger = ledger

    @abstractmethod
    def bind(self, batches: Sequence[Sequence[SwappedState]]) -> Bound:
        """Make memory, copies and views for batches of states.

        Raises:
            torch.OutOfMemoryError: the device has no room for the views to be made. Nothing is
                lost, nothing is held.
        """

    def _new_storage(self) -> torch.UntypedStorage:
        # uint8, so that every size is a multiple of the item size: torch_npu checks that only
        # after it has replaced the storage.
        empty = torch.empty(0, dtype=torch.uint8, device=self._device.torch_device)
        return empty.untyped_storage()

    def _view(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        offset: int,
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> torch.Tensor:
        """A tensor over ``storage`` from byte ``offset``."""
        self._ledger.views_made += 1
        view = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return view.set_(storage, offset // dtype.itemsize, shape, stride)

    def _local(
        self, storage: torch.UntypedStorage, offset: int, state: SwappedState
    ) -> torch.Tensor:
        """A state over the bytes of ``storage`` from ``offset``."""
        views = [
            self._view(storage, memory.dtype, offset + memory.offset, memory.shape, memory.stride)
            for memory in state.form.memories
        ]
        return state.form.over(views)

    def _bytes(self, storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
        return self._view(storage, torch.uint8, offset, (nbytes,), (1,))

    def _batch(
        self, index: int, nbytes: int, memory: DeviceMemory, transfers: Sequence[Transfer]
    ) -> TorchBatch:
        return Batch(
            index=index,
            nbytes=nbytes,
            memory=memory,
            transfers=tuple(transfers),
            restored=self._device.create_event(),
            loaded=self._device.create_event(),
            updated=self._device.create_event(),
            stored=self._device.create_event(),
        )


@final
class PackedStaging(Staging):
    """A few arenas, shared by all batches and all plans.

    Args:
        device: The verbs.
        pool: The host memory of the states.
        ledger: Where views are counted.
        arenas: How many arenas.
    """

    def __init__(self, device: AnyTorchDevice, pool: HostPool, ledger: Ledger, arenas: int) -> None:
        super().__init__(device, pool, ledger)
        self._arenas = [self._new_storage() for _ in range(arenas)]

    def bind(self, batches: Sequence[Sequence[SwappedState]]) -> Bound:
        """Lay each batch out in its arena, as it lies in host memory: one copy per run."""
        runs = [runs_of([state.slot.span for state in batch]) for batch in batches]
        nbytes = [sum(run.span.nbytes for run in batch) for batch in runs]
        ring = min(len(self._arenas), len(batches))
        memories = [
            DeviceMemory((arena,), (max(nbytes[number::ring]),))
            for number, arena in enumerate(self._arenas[:ring])
        ]
        bound: list[TorchBatch] = []
        views: list[list[torch.Tensor]] = []
        for index, states in enumerate(batches):
            memory = memories[index % ring]
            restore_or_explain(self._device, memory, f"staging arena {index % ring}")
            try:
                arena = memory.storages[0]
                transfers = [self._transfer(arena, run) for run in runs[index]]
                views.append(self._views(arena, states))
            finally:
                self._device.release(memory)
            bound.append(self._batch(index, nbytes[index], memory, transfers))
        arenas = [(memory, memory.sizes[0]) for memory in memories]
        pipeline = PackedPipeline(self._device, self._ledger, arenas)
        return Bound(pipeline, tuple(bound), tuple(views), ring)

    def _transfer(self, arena: torch.UntypedStorage, run: Run) -> Transfer:
        on_device = self._bytes(arena, run.arena_offset, run.span.nbytes)
        return Transfer(on_device, self._pool.bytes_at(run.span))

    def _views(
        self, arena: torch.UntypedStorage, states: Sequence[SwappedState]
    ) -> list[torch.Tensor]:
        offsets = accumulate((state.slot.span.nbytes for state in states), initial=0)
        return [
            self._local(arena, offset, state)
            for state, offset in zip(states, offsets, strict=False)
        ]


@final
class PerTensorStaging(Staging):
    """A storage for each state, shared by all plans."""

    def __init__(self, device: AnyTorchDevice, pool: HostPool, ledger: Ledger) -> None:
        super().__init__(device, pool, ledger)
        self._shells: dict[torch.Tensor, tuple[torch.Tensor, Transfer]] = {}

    def bind(self, batches: Sequence[Sequence[SwappedState]]) -> Bound:
        """Give each state its storage: one copy per state."""
        bound: list[TorchBatch] = []
        views: list[list[torch.Tensor]] = []
        for index, states in enumerate(batches):
            shells = [self._shell(state) for state in states]
            memory = DeviceMemory(
                tuple(transfer.device.untyped_storage() for _, transfer in shells),
                tuple(state.slot.nbytes for state in states),
            )
            transfers = [transfer for _, transfer in shells]
            bound.append(self._batch(index, sum(memory.sizes), memory, transfers))
            views.append([shell for shell, _ in shells])
        pipeline = PerTensorPipeline(self._device, self._ledger)
        return Bound(pipeline, tuple(bound), tuple(views), ring=2)

    def _shell(self, state: SwappedState) -> tuple[torch.Tensor, Transfer]:
        """The device tensor of a state, without bytes, and the copy between it and the host."""
        if state.host not in self._shells:
            nbytes = state.slot.nbytes
            storage = self._new_storage()
            memory = DeviceMemory((storage,), (nbytes,))
            what = f"{state.slot.key} of {state.slot.owner}"
            restore_or_explain(self._device, memory, what)
            try:
                shell = self._local(storage, 0, state)
                on_device = self._bytes(storage, 0, nbytes)
            finally:
                self._device.release(memory)
            on_host = self._pool.bytes_at(state.slot.span)[:nbytes]
            self._shells[state.host] = shell, Transfer(on_device, on_host)
        return self._shells[state.host]
