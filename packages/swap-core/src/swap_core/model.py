# SPDX-License-Identifier: Apache-2.0
"""A device made of arithmetic: the real pipelines run on it and tell how long a step would take.

Nothing sleeps and nothing is measured, so timings are exact and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

__all__ = ["VirtualDevice", "VirtualEvent", "VirtualMemory", "VirtualStream"]


@dataclass(slots=True)
class VirtualStream:
    """An in-order queue, known by when it will be free (seconds)."""

    name: str
    free_at: float = 0.0


@dataclass(slots=True)
class VirtualEvent:
    """When the marked work ends (seconds)."""

    at: float = 0.0


@dataclass(slots=True)
class VirtualMemory:
    """Device memory of a fixed size, held or not."""

    nbytes: int
    held: bool = False


@final
@dataclass
class VirtualDevice:
    """A device with two copy engines and a compute engine on a virtual clock.

    A transfer is its number of bytes. The caller runs updates with :meth:`compute`.

    Args:
        load_bytes_per_second: Bandwidth from host to device.
        store_bytes_per_second: Bandwidth from device to host.
        latency: Seconds that each copy takes besides its bytes.
        duplex: Whether both directions run at full speed at once. If not, one copy at a time.
        capacity: Bytes of device memory; more is out of memory.
    """

    load_bytes_per_second: float
    store_bytes_per_second: float
    latency: float = 0.0
    duplex: bool = True
    capacity: float = float("inf")

    load_stream: VirtualStream = field(default_factory=lambda: VirtualStream("load"))
    store_stream: VirtualStream = field(default_factory=lambda: VirtualStream("store"))
    held_bytes: int = 0
    peak_bytes: int = 0
    _compute: VirtualStream = field(default_factory=lambda: VirtualStream("compute"))
    _link_free_at: float = 0.0

    @property
    def out_of_memory(self) -> type[Exception]:
        """Raised by :meth:`restore` over the capacity."""
        return MemoryError

    @property
    def now(self) -> float:
        """Seconds at which everything queued so far is done."""
        return max(s.free_at for s in (self._compute, self.load_stream, self.store_stream))

    def compute(self, seconds: float) -> None:
        """Queue an update that takes this long on the compute stream."""
        self._compute.free_at += seconds

    def compute_stream(self) -> VirtualStream:
        """The only compute stream."""
        return self._compute

    def create_event(self) -> VirtualEvent:
        """Make an event at time 0."""
        return VirtualEvent()

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        """Mark when ``stream`` will be free."""
        event.at = stream.free_at

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        """Keep ``stream`` busy until the event."""
        stream.free_at = max(stream.free_at, event.at)

    def synchronize(self, event: VirtualEvent) -> None:
        """Do nothing: the host has no clock here."""

    def elapsed(self, start: VirtualEvent, end: VirtualEvent) -> float:
        """Seconds between the events."""
        return end.at - start.at

    def restore(self, memory: VirtualMemory) -> None:
        """Hold ``memory``; at once, as a caching allocator does."""
        if memory.held:
            return
        if self.held_bytes + memory.nbytes > self.capacity:
            raise MemoryError(f"{memory.nbytes:,} bytes over {self.held_bytes:,} held")
        memory.held = True
        self.held_bytes += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, memory: VirtualMemory) -> None:
        """Stop holding ``memory``."""
        if memory.held:
            memory.held = False
            self.held_bytes -= memory.nbytes

    def release_behind(self, memory: VirtualMemory, stream: VirtualStream) -> None:
        """Stop holding ``memory``."""
        self.release(memory)

    def copy_in(self, stream: VirtualStream, transfers: Sequence[int]) -> None:
        """Occupy ``stream``, and the link, for the copies."""
        self._copy(stream, transfers, self.load_bytes_per_second)

    def copy_out(self, stream: VirtualStream, transfers: Sequence[int]) -> None:
        """Occupy ``stream``, and the link, for the copies."""
        self._copy(stream, transfers, self.store_bytes_per_second)

    def _copy(self, stream: VirtualStream, transfers: Sequence[int], rate: float) -> None:
        for nbytes in transfers:
            start = stream.free_at if self.duplex else max(stream.free_at, self._link_free_at)
            stream.free_at = start + self.latency + nbytes / rate
            self._link_free_at = stream.free_at
