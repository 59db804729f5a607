# SPDX-License-Identifier: Apache-2.0
"""What both pipelines share: how an update begins, goes on, ends and fails.

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
from typing import Generic, TypeVar

from swap_core.batch import Batch
from swap_core.device import SwapDevice
from swap_core.errors import SwapInternalError
from swap_core.ledger import Ledger
from swap_core.moves import Moves, Update
from swap_core.passage import Passage
from swap_core.recovery import bring_to_host
from swap_core.slot import Residency

__all__ = ["Pipeline"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")


class Pipeline(ABC, Generic[StreamT, EventT, MemoryT, TransferT]):
    """One way to run batches through a device. Holds no states; one update at a time.

    An update is one call of :meth:`run`, or begins earlier: :meth:`begin` takes device memory and
    queues the first loads, :meth:`proceed` updates one batch after the other as long as one is
    ready, and :meth:`run` does what is left. Whoever gives up an update that began, or wants a
    kept batch on the host, calls :meth:`bring_home`.

    Between updates the events of batches are those of :attr:`latest`, whatever was begun and given
    up since, or brought home.

    Args:
        device: The verbs.
        ledger: Where copies and bytes are counted.
    """

    def __init__(
        self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT], ledger: Ledger
    ) -> None:
        self._moves = Moves(device, ledger)
        self._begun: Passage[EventT, MemoryT, TransferT] | None = None
        self.latest: Passage[EventT, MemoryT, TransferT] | None = None
        """The latest update that was done; its events tell its times."""
        self.run_called = device.create_event()
        """Marks the call of ``run`` for an update that began earlier (compute stream)."""
        self.meanwhile_done = device.create_event()
        """Marks the end of the work that needs no swapped state (compute stream)."""
        self.on_begin: Callable[[], None] | None = None
        """Called when an update begins early, before anything is queued for it."""

    @property
    def device(self) -> SwapDevice[StreamT, EventT, MemoryT, TransferT]:
        """What everything goes through. Between updates a decorator of it may take its place."""
        return self._moves.device

    @device.setter
    def device(self, device: SwapDevice[StreamT, EventT, MemoryT, TransferT]) -> None:
        self._moves.device = device

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
        compute = self.device.compute_stream()
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
        compute = self.device.compute_stream()
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
        compute = self.device.compute_stream()
        try:
            passage = self._begun
            if passage is None:
                passage = self._start(compute, batches, after, early=False)
            else:
                self.device.record(self.run_called, compute)
            meanwhile()
            self.device.record(self.meanwhile_done, compute)
            while passage.position < len(passage.order):
                self._pass(compute, passage, update, keep=keep_last)
            passage.tail_left = leave_tail
            self._close(compute, passage)
        except BaseException as error:
            self._recover(compute, batches, error)
            raise
        self._begun, self.latest = None, passage
        self._moves.ledger.updates += 1

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
        self._recover(self.device.compute_stream(), batches, None)

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
            self._release_all()
        if early:
            # It may be given up, and until it is done the latest update's times may be asked for.
            _exchange_events(batches, self.device.create_event)
        self._begun = passage = Passage(batches, resumed=resumed, early=early)
        if early and self.on_begin is not None:
            self.on_begin()
        if after is not None:
            self.device.wait(compute, after)
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
    def _release_all(self) -> None:
        """Release whatever device memory is held."""

    def _recover(
        self,
        compute: StreamT,
        batches: Sequence[Batch[EventT, MemoryT, TransferT]],
        error: BaseException | None,
    ) -> None:
        begun, self._begun = self._begun, None
        try:
            bring_to_host(self._moves, compute, batches, self._release_all, error)
        finally:
            if begun is not None and begun.early:
                _exchange_events(begun.order, self.device.create_event)


def _exchange_events(
    batches: Sequence[Batch[EventT, MemoryT, TransferT]], create_event: Callable[[], EventT]
) -> None:
    for batch in batches:
        batch.exchange_events(create_event)
