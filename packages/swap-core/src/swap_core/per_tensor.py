# SPDX-License-Identifier: Apache-2.0
"""Batches in their own device memory, taken and given back one by one."""

from __future__ import annotations

from typing import Generic, TypeVar, final

from swap_core.batch import Batch
from swap_core.device import SwapDevice
from swap_core.ledger import Ledger
from swap_core.moves import Update
from swap_core.passage import Passage
from swap_core.pipeline import Pipeline

__all__ = ["PerTensorPipeline"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")


@final
class PerTensorPipeline(
    Pipeline[StreamT, EventT, MemoryT, TransferT], Generic[StreamT, EventT, MemoryT, TransferT]
):
    """Each state keeps its own device storage, resized to nothing between updates.

    At any time two adjacent batches have device memory: batch ``i - 1`` is given back (after its
    store) before memory is taken for batch ``i + 1``, and batch ``i + 1`` is being loaded while
    batch ``i`` is updated.
    """

    def __init__(
        self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT], ledger: Ledger
    ) -> None:
        super().__init__(device, ledger)
        self._held: list[Batch[EventT, MemoryT, TransferT]] = []

    def _open(self, compute: StreamT, passage: Passage[EventT, MemoryT, TransferT]) -> None:
        if not passage.resumed:
            self._fetch(compute, passage.order[0], len(passage.order))

    def _pass(
        self,
        compute: StreamT,
        passage: Passage[EventT, MemoryT, TransferT],
        update: Update,
        *,
        keep: bool,
    ) -> None:
        place, batches = passage.position, passage.order
        batch = batches[place]
        self._moves.await_load(compute, batch)
        if place > 0:
            self._retire(compute, batches[place - 1])
        if place + 1 < len(batches):
            self._fetch(compute, batches[place + 1], len(batches))
        self._moves.update(compute, batch, update)
        passage.position += 1
        if keep and passage.position == len(batches):
            passage.kept = True
        else:
            self._moves.store(batch)

    def _close(self, compute: StreamT, passage: Passage[EventT, MemoryT, TransferT]) -> None:
        last = passage.order[-1]
        if passage.kept:
            return
        if not passage.tail_left:
            self._retire(compute, last)
            return
        self._moves.release_behind_stores(last.memory, last.nbytes)
        self._held.remove(last)
        last.to_host()

    def _fetch(
        self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT], count: int
    ) -> None:
        self._moves.restore(batch.memory, batch.nbytes, f"batch {batch.index} of {count}")
        self._held.append(batch)
        self.device.record(batch.restored, compute)
        self.device.wait(self.device.load_stream, batch.restored)
        self._moves.load(batch)

    def _retire(self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        self.device.wait(compute, batch.stored)
        self._give_back(batch)
        batch.to_host()

    def _give_back(self, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        self._moves.release(batch.memory, batch.nbytes)
        self._held.remove(batch)

    def _release_all(self) -> None:
        for batch in tuple(self._held):
            self._give_back(batch)
