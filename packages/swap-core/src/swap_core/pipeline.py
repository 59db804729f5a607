# SPDX-License-Identifier: Apache-2.0
"""What both pipelines share: the moves of one batch, and the way back after a failure.

[Note: order]
Three streams work at once: *compute* (the caller's current stream), *load* and *store*. Each wait
below is necessary; the tests remove them one at a time and show that something breaks.

1. Device memory is taken in the order of the compute stream, so the load stream waits for
   ``restored`` before it writes there. Earlier updates' stores are ordered before, because the
   compute stream waited for the last of them: a load never reads host bytes too early.
2. The compute stream waits for ``loaded`` before the update reads.
3. The store stream waits for ``updated`` before it reads.
4. Device memory is loaded into again, or given back, after ``stored`` was waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NoReturn, TypeVar

from swap_core.batch import Batch
from swap_core.device import SwapDevice
from swap_core.errors import StateLostError
from swap_core.ledger import Ledger
from swap_core.slot import Residency

__all__ = ["Pipeline", "Update", "restore_or_explain"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")

_INTERRUPTS_BORNE = 3

Update = Callable[[int], None]
"""Queue the update of the batch with this index on the compute stream."""


class Pipeline(ABC, Generic[StreamT, EventT, MemoryT, TransferT]):
    """One way to run batches through a device. Holds no states; one call of ``run`` at a time.

    Args:
        device: The verbs.
        ledger: Where copies and bytes are counted.
    """

    def __init__(
        self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT], ledger: Ledger
    ) -> None:
        self._device = device
        self._ledger = ledger
        self.meanwhile_done = device.create_event()
        """Marks the end of the work that needs no swapped state (compute stream)."""

    @property
    def device(self) -> SwapDevice[StreamT, EventT, MemoryT, TransferT]:
        """What everything goes through. Between updates a decorator of it may take its place."""
        return self._device

    @device.setter
    def device(self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT]) -> None:
        self._device = device

    def run(
        self,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        update: Update,
        meanwhile: Callable[[], None],
    ) -> None:
        """Load, update and store every batch once, without blocking the host.

        Afterwards all batches are on the host once the last batch's ``stored`` event happened,
        and no device memory is held.

        Args:
            batches: At least one; all on the host.
            update: Queues the update of one batch on the compute stream.
            meanwhile: Queues work that needs no swapped state; it overlaps the first load.

        Raises:
            Exception: whatever the device or ``update`` raised. Then every batch is on the host
                with the values its counters tell, nothing is in flight, no device memory is held.
            StateLostError: after such an error a batch could not be stored either.
        """
        compute = self._device.compute_stream()
        try:
            # What a failed release left held is released before it is held again.
            self._release_all(batches)
            self._run(compute, batches, update, meanwhile)
        except BaseException as error:
            self._recover(compute, batches, error)
            raise
        self._ledger.updates += 1

    @abstractmethod
    def _run(
        self,
        compute: StreamT,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        update: Update,
        meanwhile: Callable[[], None],
    ) -> None:
        """Run the batches, ending with all device memory released."""

    @abstractmethod
    def _release_all(self, batches: Sequence[Batch[EventT, MemoryT, TransferT]]) -> None:
        """Release whatever device memory is held."""

    # The moves of one batch. Each queues work, records its event, and changes the residency last.

    def _load(self, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        load = self._device.load_stream
        self._device.copy_in(load, batch.transfers)
        self._device.record(batch.loaded, load)
        self._ledger.copies_in += len(batch.transfers)
        self._ledger.bytes_loaded += batch.nbytes
        batch.to_loading()

    def _update(
        self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT], update: Update
    ) -> None:
        batch.to_device()
        update(batch.index)
        self._device.record(batch.updated, compute)

    def _store(self, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        store = self._device.store_stream
        self._device.wait(store, batch.updated)
        self._device.copy_out(store, batch.transfers)
        self._device.record(batch.stored, store)
        self._ledger.copies_out += len(batch.transfers)
        self._ledger.bytes_stored += batch.nbytes
        batch.to_storing()

    def _restore(self, memory: MemoryT, nbytes: int, what: str) -> None:
        restore_or_explain(self._device, memory, f"{what} ({nbytes:,} bytes)")
        self._ledger.hold(nbytes)

    def _release(self, memory: MemoryT, nbytes: int) -> None:
        self._device.release(memory)
        self._ledger.drop(nbytes)

    # The way back.

    def _recover(
        self,
        compute: StreamT,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        error: BaseException,
    ) -> None:
        """Bring every batch to the host and give all device memory back, after an error.

        A batch on the device may be updated in part, and its parameters with it: its states go to
        the host, so that they belong to those parameters. A loaded batch was not touched: its
        load is given up.

        Who waits for this may interrupt it: each part is then done again, and the first error
        raised in the end.
        """
        lost = {batch.index for batch in batches if not self._stored_again(compute, batch)}
        try:
            _despite_interrupts(partial(self._join, compute, batches[0]))
        except Exception:  # noqa: BLE001  # whatever it is, memory must be given back
            lost |= {batch.index for batch in batches if batch.residency is Residency.STORING}
        for batch in batches:
            if batch.residency is not Residency.HOST:
                batch.to_host()
        try:
            _despite_interrupts(partial(self._release_all, batches))
        finally:
            if lost:
                self._raise_lost(sorted(lost), len(batches), error)

    def _stored_again(self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT]) -> bool:
        """Store a batch that is on the device; tell whether its states will be on the host."""

        def store() -> None:
            if batch.residency is Residency.DEVICE:
                self._device.record(batch.updated, compute)
                self._store(batch)

        try:
            _despite_interrupts(store)
        except Exception:  # noqa: BLE001  # whatever it is, the others must be saved
            batch.to_storing()
            return False
        return True

    def _join(self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        """Wait for all copies in flight, on the host too. Records the events of ``batch`` anew."""
        self._device.record(batch.loaded, self._device.load_stream)
        self._device.wait(compute, batch.loaded)
        self._device.record(batch.stored, self._device.store_stream)
        self._device.wait(compute, batch.stored)
        self._device.synchronize(batch.loaded)
        self._device.synchronize(batch.stored)

    @staticmethod
    def _raise_lost(lost: Sequence[int], count: int, error: BaseException) -> NoReturn:
        raise StateLostError(
            f"Batches {list(lost)} of {count} could not be stored to the host after an error, "
            f"not even on a second attempt: their states on the host are older than their "
            f"parameters. Go on from a checkpoint. (First error: {error!r})"
        ) from error


def _despite_interrupts(action: Callable[[], None]) -> None:
    """Run ``action``, from its beginning again if it is interrupted, such as with Ctrl-C."""
    for _ in range(_INTERRUPTS_BORNE):
        try:
            return action()
        except Exception:
            raise
        except BaseException:  # noqa: BLE001  # the error that this follows is raised
            continue
    return action()


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
