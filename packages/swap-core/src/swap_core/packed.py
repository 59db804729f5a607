# SPDX-License-Identifier: Apache-2.0
"""Batches through a ring of arenas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

from swap_core.batch import Batch
from swap_core.device import SwapDevice
from swap_core.ledger import Ledger
from swap_core.pipeline import Pipeline, Update

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
    hold nothing. With two arenas the load of batch ``i + 1`` is queued before the update of batch
    ``i``, and the load of batch ``i + 2`` follows the store of batch ``i``.

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
        self._held = 0

    def _run(
        self,
        compute: StreamT,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        update: Update,
        meanwhile: Callable[[], None],
    ) -> None:
        device, ring = self._device, len(self._arenas)
        self._restore_arenas(len(batches))
        device.record(batches[0].restored, compute)
        device.wait(device.load_stream, batches[0].restored)
        for batch in batches[:ring]:
            self._load(batch)
        meanwhile()
        device.record(self.meanwhile_done, compute)
        for batch in batches:
            device.wait(compute, batch.loaded)
            self._update(compute, batch, update)
            self._store(batch)
            if batch.index + ring < len(batches):
                # The next batch of this arena overwrites what the store still reads.
                device.wait(device.load_stream, batch.stored)
                self._load(batches[batch.index + ring])
        # The store stream is in order: its last event covers all.
        device.wait(compute, batches[-1].stored)
        self._release_all(batches)
        for batch in batches:
            batch.to_host()

    def _restore_arenas(self, batches: int) -> None:
        ring = len(self._arenas)
        for number, (arena, nbytes) in enumerate(self._arenas):
            members = ", ".join(map(str, range(number, batches, ring)[:3])) or "none"
            self._restore(arena, nbytes, f"staging arena {number} (batches {members}, …)")
            self._held += 1

    def _release_all(self, batches: Sequence[Batch[EventT, MemoryT, TransferT]]) -> None:
        while self._held:
            self._release(*self._arenas[self._held - 1])
            self._held -= 1
