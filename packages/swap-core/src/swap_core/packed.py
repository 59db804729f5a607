# SPDX-License-Identifier: Apache-2.0
"""Batches through a ring of arenas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, final

from swap_core.device import SwapDevice
from swap_core.ledger import Ledger
from swap_core.moves import Update
from swap_core.passage import Passage
from swap_core.pipeline import Pipeline

__all__ = ["PackedPipeline"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")


@final
class PackedPipeline(
    Pipeline[StreamT, EventT, MemoryT, TransferT], Generic[StreamT, EventT, MemoryT, TransferT]
):
    """Batch ``i`` lives in arena ``i % len(arenas)`` while it is on the device.

    All arenas are taken at the start of an update and given back at its end: between updates they
    hold nothing but a kept batch. With two arenas the load of batch ``i + 1`` is queued before the
    update of batch ``i``, and the load of batch ``i + 2`` follows the store of batch ``i``. In the
    reverse order the same holds, since neighbours are in different arenas both ways.

    Args:
        device: The verbs.
        ledger: Where copies and bytes are counted.
        arenas: Each arena with its bytes, the memory of every batch with ``index % len(arenas)``.
    """

    def __init__(
        self,
        device: SwapDevice[StreamT, EventT, MemoryT, TransferT],
        ledger: Ledger,
        arenas: Sequence[tuple[MemoryT, int]],
    ) -> None:
        super().__init__(device, ledger)
        self._arenas = tuple(arenas)
        self._held: list[int] = []

    def _open(self, compute: StreamT, passage: Passage[EventT, MemoryT, TransferT]) -> None:
        device, batches = self.device, passage.order
        for number in range(len(self._arenas)):
            if number not in self._held:
                self._restore_arena(number, len(batches))
        device.record(batches[0].restored, compute)
        device.wait(device.load_stream, batches[0].restored)
        for batch in batches[passage.resumed : len(self._arenas)]:
            self._moves.load(batch)

    def _pass(
        self,
        compute: StreamT,
        passage: Passage[EventT, MemoryT, TransferT],
        update: Update,
        *,
        keep: bool,
    ) -> None:
        batch, batches = passage.order[passage.position], passage.order
        self._moves.await_load(compute, batch)
        self._moves.update(compute, batch, update)
        passage.position += 1
        if keep and passage.position == len(batches):
            passage.kept = True
            return
        self._moves.store(batch)
        following = passage.position - 1 + len(self._arenas)
        if following < len(batches):
            # The next batch of this arena overwrites what the store still reads.
            self.device.wait(self.device.load_stream, batch.stored)
            self._moves.load(batches[following])

    def _close(self, compute: StreamT, passage: Passage[EventT, MemoryT, TransferT]) -> None:
        ring, stored = len(self._arenas), passage.stored
        kept = {passage.order[-1].index % ring} if passage.kept else set()
        # The store stream is in order: waiting for one store is waiting for all before it.
        waited = stored[:-1] if passage.tail_left else stored
        if waited:
            self.device.wait(compute, waited[-1].stored)
        left = {stored[-1].index % ring} if stored and passage.tail_left else set()
        # What is left behind comes last: then nothing of it hides a wait that is missing.
        held = [number for number in reversed(self._held) if number not in kept]
        for number in sorted(held, key=left.__contains__):
            give_back = self._moves.release_behind_stores if number in left else self._moves.release
            give_back(*self._arenas[number])
            self._held.remove(number)
        for batch in stored:
            batch.to_host()

    def _restore_arena(self, number: int, batches: int) -> None:
        members = ", ".join(map(str, range(number, batches, len(self._arenas))[:3])) or "none"
        arena, nbytes = self._arenas[number]
        self._moves.restore(arena, nbytes, f"staging arena {number} (batches {members}, …)")
        self._held.append(number)

    def _release_all(self) -> None:
        while self._held:
            self._moves.release(*self._arenas[self._held[-1]])
            self._held.pop()
