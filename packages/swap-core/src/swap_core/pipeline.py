# SPDX-License-Identifier: Apache-2.0
"""What both pipelines share: the moves of one batch, and the way back after a failure.

[Note: order]
Three streams work at once: *compute* (the caller's current stream), *load* and *store*. Each wait
below is necessary; the tests remove them one at a time and show that something breaks.

1. Device memory is taken in the order of the compute stream, so the load stream waits for
   ``restored`` before it writes there. Earlier updates' stores are ordered before, because the
   compute stream waited for the last of them, at the end of their update or (of a tail that was
   left) at the beginning of the next: a load never reads host bytes too early.
2. The compute stream waits for ``loaded`` before the update reads.
3. The store stream waits for ``updated`` before it reads.
4. Device memory is loaded into again after ``stored`` was waited for. It is given back after that
   too, or behind the store stream, where an allocator keeps it until the store is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NoReturn, TypeVar

from swap_core.batch import Batch
from swap_core.device import SwapDevice
from swap_core.errors import StateLostError, SwapInternalError
from swap_core.ledger import Ledger
from swap_core.passage import Passage
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
    """One way to run batches through a device. Holds no states; one update at a time.

    An update is one call of :meth:`run`, or begins earlier: :meth:`begin` takes device memory and
    queues the first loads, :meth:`proceed` updates one batch after the other as long as one is
    ready, and :meth:`run` does what is left. Whoever gives up an update that began, or wants a
    kept batch on the host, calls :meth:`bring_home`.

    Args:
        device: The verbs.
        ledger: Where copies and bytes are counted.
    """

    def __init__(
        self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT], ledger: Ledger
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._begun: Passage[EventT, MemoryT, TransferT] | None = None
        self.latest: Passage[EventT, MemoryT, TransferT] | None = None
        """The latest update that was done; its events tell its times."""
        self.run_called = device.create_event()
        """Marks the call of ``run`` for an update that began earlier (compute stream)."""
        self.meanwhile_done = device.create_event()
        """Marks the end of the work that needs no swapped state (compute stream)."""

    @property
    def device(self) -> SwapDevice[StreamT, EventT, MemoryT, TransferT]:
        """What everything goes through. Between updates a decorator of it may take its place."""
        return self._device

    @device.setter
    def device(self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT]) -> None:
        self._device = device

    @property
    def begun(self) -> Passage[EventT, MemoryT, TransferT] | None:
        """The update that began and is not done."""
        return self._begun

    def begin(
        self,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        after: EventT | None = None,
    ) -> None:
        """Take device memory and queue the first loads, before :meth:`run` is called.

        The host may read the states until then, but not write them.

        Args:
            batches: As for :meth:`run`.
            after: As for :meth:`run`.

        Raises:
            Exception: as :meth:`run`.
        """
        compute = self._device.compute_stream()
        try:
            self._start(compute, batches, after, early=True)
        except BaseException as error:
            self._recover(compute, batches, error)
            raise

    def proceed(self, update: Update) -> None:
        """Update and store the next batch of an update that began; its gradients are final.

        Args:
            update: As for :meth:`run`.

        Raises:
            Exception: as :meth:`run`.
        """
        compute = self._device.compute_stream()
        passage = self._passage()
        try:
            self._pass(compute, passage, update, keep=False)
        except BaseException as error:
            self._recover(compute, passage.order, error)
            raise

    def run(
        self,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        update: Update,
        meanwhile: Callable[[], None],
        *,
        after: EventT | None = None,
        keep_last: bool = False,
        leave_tail: bool = False,
    ) -> None:
        """Load, update and store every batch once, without blocking the host.

        Afterwards all batches but a kept one are on the host once the last batch's ``stored`` event
        happened, and no device memory is held but a kept batch's.

        Args:
            batches: At least one, in the order in which they are updated: that of their indices,
                or the reverse. All on the host, except that the first may be kept from the update
                before.
            update: Queues the update of one batch on the compute stream.
            meanwhile: Queues work that needs no swapped state; it overlaps the first load.
            after: The last store of an earlier update of the same states that was left.
            keep_last: Do not store the last batch: it is the first of the next update.
            leave_tail: Do not let the compute stream wait for the last store. The last batch's
                memory goes back behind it; who reads the host states, or loads them, waits for it.

        Raises:
            Exception: whatever the device or ``update`` raised. Then every batch is on the host
                with the values its counters tell, nothing is in flight, no device memory is held.
            StateLostError: after such an error a batch could not be stored either.
        """
        compute = self._device.compute_stream()
        try:
            passage = self._begun
            if passage is None:
                passage = self._start(compute, batches, after, early=False)
            else:
                self._device.record(self.run_called, compute)
            meanwhile()
            self._device.record(self.meanwhile_done, compute)
            while passage.position < len(passage.order):
                self._pass(compute, passage, update, keep=keep_last)
            passage.tail_left = leave_tail
            self._close(compute, passage)
        except BaseException as error:
            self._recover(compute, batches, error)
            raise
        self._begun, self.latest = None, passage
        self._ledger.updates += 1

    def bring_home(self, batches: Sequence[Batch[EventT, MemoryT, TransferT]]) -> None:
        """Store a kept batch and give up loads, so that all batches are on the host.

        Blocks the host if there was anything to do.

        Args:
            batches: Those of the update that began, or of the latest one.

        Raises:
            StateLostError: a batch could not be stored.
        """
        if self._begun is None and all(batch.residency is Residency.HOST for batch in batches):
            return
        self._recover(self._device.compute_stream(), batches, None)

    def _start(
        self,
        compute: StreamT,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        after: EventT | None,
        *,
        early: bool,
    ) -> Passage[EventT, MemoryT, TransferT]:
        if self._begun is not None:
            raise SwapInternalError("an update begins before the one before it is done")
        resumed = batches[0].residency is Residency.DEVICE
        if not resumed:
            # What a failed release left held is released before it is held again.
            self._release_all(batches)
        self._begun = passage = Passage(batches, resumed=resumed, early=early)
        if after is not None:
            self._device.wait(compute, after)
        self._open(compute, passage)
        return passage

    def _passage(self) -> Passage[EventT, MemoryT, TransferT]:
        if self._begun is None:
            raise SwapInternalError("no update began")
        return self._begun

    @abstractmethod
    def _open(self, compute: StreamT, passage: Passage[EventT, MemoryT, TransferT]) -> None:
        """Take device memory and queue the first loads."""

    @abstractmethod
    def _pass(
        self,
        compute: StreamT,
        passage: Passage[EventT, MemoryT, TransferT],
        update: Update,
        *,
        keep: bool,
    ) -> None:
        """Update and store the next batch, and queue the load that may follow.

        Args:
            compute: The stream of the update.
            passage: Moves on by one position.
            update: Queues the update.
            keep: If the batch is the last one, do not store it.
        """

    @abstractmethod
    def _close(self, compute: StreamT, passage: Passage[EventT, MemoryT, TransferT]) -> None:
        """Give back all device memory but that of a kept batch; all others are on the host."""

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

    def _await_load(self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT]) -> None:
        if batch.residency is Residency.LOADING:  # of a kept batch it was waited for already
            self._device.wait(compute, batch.loaded)

    def _update(
        self, compute: StreamT, batch: Batch[EventT, MemoryT, TransferT], update: Update
    ) -> None:
        if batch.residency is not Residency.DEVICE:
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

    def _release_behind_stores(self, memory: MemoryT, nbytes: int) -> None:
        self._device.release_behind(memory, self._device.store_stream)
        self._ledger.drop(nbytes)

    # The way back.

    def _recover(
        self,
        compute: StreamT,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        error: BaseException | None,
    ) -> None:
        """Bring every batch to the host and give all device memory back, as after an error.

        A batch on the device may be updated in part, and its parameters with it: its states go to
        the host, so that they belong to those parameters. A loaded batch was not touched: its
        load is given up.

        Who waits for this may interrupt it: each part is then done again, and the first error
        raised in the end.
        """
        lost = self._stored_home(compute, batches)
        try:
            _despite_interrupts(partial(self._release_all, batches))
        finally:
            if lost:
                self._raise_lost(lost, len(batches), error)

    def _stored_home(
        self, compute: StreamT, batches: Sequence[Batch[EventT, MemoryT, TransferT]]
    ) -> list[int]:
        """Bring the values of every batch to the host; tell which were lost."""
        self._begun = None
        lost = {batch.index for batch in batches if not self._stored_again(compute, batch)}
        try:
            _despite_interrupts(partial(self._join, compute, batches[0]))
        except Exception:  # noqa: BLE001  # whatever it is, memory must be given back
            lost |= {batch.index for batch in batches if batch.residency is Residency.STORING}
        for batch in batches:
            if batch.residency is not Residency.HOST:
                batch.to_host()
        return sorted(lost)

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
    def _raise_lost(lost: Sequence[int], count: int, error: BaseException | None) -> NoReturn:
        after = "after an error" if error is not None else "between updates"
        raise StateLostError(
            f"Batches {list(lost)} of {count} could not be stored to the host {after}, "
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
