# SPDX-License-Identifier: Apache-2.0
"""A device that writes down what it is told, and can be told to misbehave.

It wraps any :class:`swap_core.SwapDevice`, so the very pipelines that users run are observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from swap_core import SwapDevice

__all__ = ["Op", "RecordingDevice", "Region", "Regions", "Tamper"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")
MemoryT_contra = TypeVar("MemoryT_contra", contravariant=True)
TransferT_contra = TypeVar("TransferT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes ``start`` to ``end`` of one buffer."""

    buffer: object
    """What identifies the buffer; hashable."""
    start: int
    end: int

    def overlaps(self, other: Region) -> bool:
        """Tell whether the two have a byte in common."""
        return self.shared_bytes(other) > 0

    def shared_bytes(self, other: Region) -> int:
        """How many bytes the two have in common."""
        if self.buffer != other.buffer:
            return 0
        return max(0, min(self.end, other.end) - max(self.start, other.start))


class Regions(Protocol[MemoryT_contra, TransferT_contra]):
    """Tells which bytes a handle stands for."""

    def of_memory(self, memory: MemoryT_contra) -> Sequence[Region]:
        """The device bytes of a memory."""
        ...

    def of_transfer(self, transfer: TransferT_contra) -> tuple[Region, Region]:
        """The device bytes and the host bytes of a transfer."""
        ...


@dataclass(frozen=True, slots=True)
class Op:
    """One thing that was asked of the device, whether or not it could do it."""

    verb: str
    """``restore release copy_in copy_out update record wait synchronize`` or ``host_read``."""
    stream: str
    """``compute``, ``load``, ``store`` or ``host``."""
    event: int | None = None
    """Number of the event that is recorded or waited for."""
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()

    def __str__(self) -> str:
        """Tell what it is in a few words."""
        event = f" event {self.event}" if self.event is not None else ""
        return f"{self.verb}{event} on {self.stream}"


@dataclass(slots=True)
class Tamper:
    """A fault to plant: the call number ``nth`` (from 0) of ``verb`` is left out, or raises.

    Attributes:
        verb: Name of the verb.
        nth: Which of its calls, counted from when the fault is planted.
        error: Raised in place of the call; None leaves it out silently.
        times: How many calls in a row, from ``nth`` on.
    """

    verb: str
    nth: int
    error: Exception | None = None
    times: int = 1
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def strikes(self) -> bool:
        """Count one call of the verb and tell whether it is the one."""
        hit = self.nth <= self.seen < self.nth + self.times
        self.seen += 1
        self.fired += hit
        return hit


class RecordingDevice(Generic[StreamT, EventT, MemoryT, TransferT]):
    """Passes every verb on to ``inner`` and keeps a log of them.

    Args:
        inner: The device that does the work.
        regions: Tells which bytes its handles stand for.
    """

    def __init__(
        self,
        inner: SwapDevice[StreamT, EventT, MemoryT, TransferT],
        regions: Regions[MemoryT, TransferT],
    ) -> None:
        self.log: list[Op] = []
        self.tamper: Tamper | None = None
        self._inner = inner
        self._regions = regions
        self._lives: dict[object, int] = {}
        """How often each buffer was released behind a stream: it is another block afterwards."""
        self._events: list[EventT] = []  # kept, so that no other object gets the identity of one
        self._numbers: dict[int, int] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> RecordingDevice[Any, Any, Any, Any]:
        """A device is a place: a copied optimizer is on the same one."""
        return self

    @property
    def load_stream(self) -> StreamT:
        """The inner device's."""
        return self._inner.load_stream

    @property
    def store_stream(self) -> StreamT:
        """The inner device's."""
        return self._inner.store_stream

    @property
    def out_of_memory(self) -> type[Exception]:
        """The inner device's."""
        return self._inner.out_of_memory

    def compute_stream(self) -> StreamT:
        """The inner device's."""
        return self._inner.compute_stream()

    def create_event(self) -> EventT:
        """Make an event and give it a number."""
        event = self._inner.create_event()
        self._numbers[id(event)] = len(self._events)
        self._events.append(event)
        return event

    def elapsed(self, start: EventT, end: EventT) -> float:
        """The inner device's."""
        return self._inner.elapsed(start, end)

    def record(self, event: EventT, stream: StreamT) -> None:
        """Log and pass on."""
        op = Op("record", self._name(stream), self._number(event))
        self._do(op, lambda: self._inner.record(event, stream))

    def wait(self, stream: StreamT, event: EventT) -> None:
        """Log and pass on."""
        op = Op("wait", self._name(stream), self._number(event))
        self._do(op, lambda: self._inner.wait(stream, event))

    def synchronize(self, event: EventT) -> None:
        """Log and pass on."""
        op = Op("synchronize", "host", self._number(event))
        self._do(op, lambda: self._inner.synchronize(event))

    def restore(self, memory: MemoryT) -> None:
        """Log and pass on; restored memory is undefined, so it counts as written."""
        op = Op("restore", "compute", writes=self._memory(memory))
        self._do(op, lambda: self._inner.restore(memory))

    def release(self, memory: MemoryT) -> None:
        """Log and pass on; released memory may be overwritten, so it counts as written."""
        op = Op("release", "compute", writes=self._memory(memory))
        self._do(op, lambda: self._inner.release(memory))

    def release_behind(self, memory: MemoryT, stream: StreamT) -> None:
        """Log and pass on; the memory may be overwritten behind the stream's work."""
        op = Op("release", self._name(stream), writes=self._memory(memory))
        self._do(op, lambda: self._inner.release_behind(memory, stream))
        for region in self._regions.of_memory(memory):
            self._lives[region.buffer] = self._lives.get(region.buffer, 0) + 1

    def copy_in(self, stream: StreamT, transfers: Sequence[TransferT]) -> None:
        """Log and pass on."""
        device, host = self._sides(transfers)
        op = Op("copy_in", self._name(stream), reads=host, writes=device)
        self._do(op, lambda: self._inner.copy_in(stream, transfers))

    def copy_out(self, stream: StreamT, transfers: Sequence[TransferT]) -> None:
        """Log and pass on."""
        device, host = self._sides(transfers)
        op = Op("copy_out", self._name(stream), reads=device, writes=host)
        self._do(op, lambda: self._inner.copy_out(stream, transfers))

    # For what is no verb of the device, but touches its memory.

    def note_update(self, touched: Sequence[Region]) -> None:
        """Log that the compute stream reads and writes device memory."""
        regions = tuple(map(self._now, touched))
        self.log.append(Op("update", "compute", reads=regions, writes=regions))

    def note_host_read(self, touched: Sequence[Region]) -> None:
        """Log that the host reads host memory."""
        self.log.append(Op("host_read", "host", reads=tuple(touched)))

    def ops(self, verb: str) -> list[Op]:
        """The logged calls of one verb."""
        return [op for op in self.log if op.verb == verb]

    def _do(self, op: Op, call: Callable[[], Any]) -> None:
        if self.tamper is not None and self.tamper.verb == op.verb and self.tamper.strikes():
            if self.tamper.error is not None:
                raise self.tamper.error
            return
        self.log.append(op)
        call()

    def _sides(
        self, transfers: Sequence[TransferT]
    ) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        pairs = [self._regions.of_transfer(transfer) for transfer in transfers]
        return tuple(self._now(device) for device, _ in pairs), tuple(host for _, host in pairs)

    def _memory(self, memory: MemoryT) -> tuple[Region, ...]:
        return tuple(map(self._now, self._regions.of_memory(memory)))

    def _now(self, region: Region) -> Region:
        """The region in the block that its buffer is now."""
        life = self._lives.get(region.buffer)
        return region if life is None else Region((region.buffer, life), region.start, region.end)

    def _name(self, stream: StreamT) -> str:
        if stream is self._inner.load_stream:
            return "load"
        return "store" if stream is self._inner.store_stream else "compute"

    def _number(self, event: EventT) -> int:
        return self._numbers[id(event)]
