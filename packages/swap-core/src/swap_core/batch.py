# SPDX-License-Identifier: Apache-2.0
"""The states that move together, and where they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

from swap_core.errors import SwapInternalError
from swap_core.slot import Residency

__all__ = ["Batch"]

EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")


@final
class Batch(Generic[EventT, MemoryT, TransferT]):
    """A contiguous part of an update: its device memory, its copies, its events, its residency.

    The device memory is the batch's own (per-tensor pipeline) or an arena shared with other
    batches (packed pipeline); the pipeline decides who frees it. Events are made once and
    recorded anew in each update. There is a second set of them for an update that begins before
    :meth:`swap_core.Pipeline.run` is called, since it may be given up: see :meth:`exchange_events`.

    Args:
        index: Place in the update, from 0.
        nbytes: Bytes that move each way.
        memory: Where the states are while they are on the device.
        transfers: The copies, bound to ``memory`` and to host memory.
        restored: Marks that ``memory`` exists (compute stream).
        loaded: Marks the end of the copies in (load stream).
        updated: Marks the end of the update (compute stream).
        stored: Marks the end of the copies out (store stream).
    """

    __slots__ = (
        "_others",
        "_residency",
        "index",
        "loaded",
        "memory",
        "nbytes",
        "restored",
        "stored",
        "transfers",
        "updated",
    )

    def __init__(
        self,
        *,
        index: int,
        nbytes: int,
        memory: MemoryT,
        transfers: tuple[TransferT, ...],
        restored: EventT,
        loaded: EventT,
        updated: EventT,
        stored: EventT,
    ) -> None:
        self.index = index
        self.nbytes = nbytes
        self.memory = memory
        self.transfers = transfers
        self.restored = restored
        self.loaded = loaded
        self.updated = updated
        self.stored = stored
        self._others: tuple[EventT, EventT, EventT, EventT] | None = None
        self._residency = Residency.HOST

    def exchange_events(self, create_event: Callable[[], EventT]) -> None:
        """Record other events from now on; those so far come back with the next call.

        Args:
            create_event: Makes the other events, in the first call.
        """
        others = self._others
        if others is None:
            others = create_event(), create_event(), create_event(), create_event()
        self._others = self.restored, self.loaded, self.updated, self.stored
        self.restored, self.loaded, self.updated, self.stored = others

    @property
    def residency(self) -> Residency:
        """Where the current values are."""
        return self._residency

    def to_loading(self) -> None:
        """The copies in are queued and ``loaded`` is recorded."""
        self._expect(Residency.HOST)
        self._residency = Residency.LOADING

    def to_device(self) -> None:
        """The compute stream waited for ``loaded``; from now on the host bytes are stale."""
        self._expect(Residency.LOADING)
        self._residency = Residency.DEVICE

    def to_storing(self) -> None:
        """The copies out are queued and ``stored`` is recorded."""
        self._expect(Residency.DEVICE)
        self._residency = Residency.STORING

    def to_host(self) -> None:
        """``stored`` is ordered before whatever comes next, or the load is given up unused."""
        self._expect(Residency.STORING, Residency.LOADING)
        self._residency = Residency.HOST

    def _expect(self, *allowed: Residency) -> None:
        if self._residency not in allowed:
            names = " or ".join(state.name for state in allowed)
            raise SwapInternalError(
                f"batch {self.index} is {self._residency.name}, expected {names}"
            )
