# SPDX-License-Identifier: Apache-2.0
"""The moves of one batch, and of device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

from swap_core.batch import Batch
from swap_core.device import SwapDevice
from swap_core.ledger import Ledger
from swap_core.slot import Residency

__all__ = ["Moves", "Update", "restore_or_explain"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")

Update = Callable[[int], None]
"""Queue the update of the batch with this index on the compute stream."""


@final
class Moves(Generic[StreamT, EventT, MemoryT, TransferT]):
    """What pipelines do with one batch at a time.

    Each move queues work, records its event, counts, and changes the residency last.

    Args:
        device: The verbs. A decorator of it may take its place between updates.
        ledger: Where copies and bytes are counted.
    """

    def __init__(
        self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT], ledger: Ledger
    ) -> None:
        self.device = device
        self.ledger = ledger
        self._last_updates = device.create_event()
        self._last_loads = device.create_event()
        self._last_stores = device.create_event()

    def load(self, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        """Queue the copies in; memory must be restored on the load stream."""
        load = self.device.load_stream
        self.device.copy_in(load, batch.transfers)
        self.device.record(batch.loaded, load)
        self.ledger.copies_in += len(batch.transfers)
        self.ledger.bytes_loaded += batch.nbytes
        batch.to_loading()

    def await_load(self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        """Let the compute stream wait for the copies in."""
        if batch.residency is Residency.LOADING:  # of a kept batch it was waited for already
            self.device.wait(compute, batch.loaded)

    def update(
        self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT], update: Update
    ) -> None:
        """Queue the update; the batch is loaded on the compute stream."""
        if batch.residency is not Residency.DEVICE:
            batch.to_device()
        update(batch.index)
        self.device.record(batch.updated, compute)

    def store(self, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        """Queue the copies out, behind the update."""
        store = self.device.store_stream
        self.device.wait(store, batch.updated)
        self.device.copy_out(store, batch.transfers)
        self.device.record(batch.stored, store)
        self._stores(batch)

    def store_home(self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        """Queue the copies out, behind all that the compute stream was given; then :meth:`join`.

        The batch's events stay those of the latest update.
        """
        store = self.device.store_stream
        self.device.record(self._last_updates, compute)
        self.device.wait(store, self._last_updates)
        self.device.copy_out(store, batch.transfers)
        self._stores(batch)

    def _stores(self, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        """All of its copies out are queued: count them."""
        self.ledger.copies_out += len(batch.transfers)
        self.ledger.bytes_stored += batch.nbytes
        batch.to_storing()

    def join(self, compute: StreamT) -> None:
        """Let the compute stream and the host wait for all copies in flight."""
        device = self.device
        device.record(self._last_loads, device.load_stream)
        device.wait(compute, self._last_loads)
        device.record(self._last_stores, device.store_stream)
        device.wait(compute, self._last_stores)
        device.synchronize(self._last_loads)
        device.synchronize(self._last_stores)

    def restore(self, memory: MemoryT, nbytes: int, what: str) -> None:
        """Take device memory, in the order of the compute stream; ``what`` is for errors."""
        restore_or_explain(self.device, memory, f"{what} ({nbytes:,} bytes)")
        self.ledger.hold(nbytes)

    def release(self, memory: MemoryT, nbytes: int) -> None:
        """Give device memory back, in the order of the compute stream."""
        self.device.release(memory)
        self.ledger.drop(nbytes)

    def release_behind_stores(self, memory: MemoryT, nbytes: int) -> None:
        """Give device memory back behind everything that is queued on the store stream."""
        self.device.release_behind(memory, self.device.store_stream)
        self.ledger.drop(nbytes)


def restore_or_explain(
    device: SwapDevice[StreamT, EventT, MemoryT, TransferT], memory: MemoryT, what: str
) -> None:
    """Restore ``memory``; if the device is full, say for what, and what to do.

    Raises:
        Exception: of the type ``device.out_of_memory``.
    """
    try:
        device.restore(memory)
    except device.out_of_memory as error:
        raise device.out_of_memory(
            f"Out of device memory while restoring {what} of optimizer states. Nothing is lost: "
            f"the states are on the host. Raise swap_times for smaller batches, or free device "
            f"memory before the update. (The device said: {error})"
        ) from error
