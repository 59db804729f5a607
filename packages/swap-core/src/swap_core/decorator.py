# SPDX-License-Identifier: Apache-2.0
"""A device around a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from swap_core.device import SwapDevice

__all__ = ["DeviceDecorator"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")


class DeviceDecorator(Generic[StreamT, EventT, MemoryT, TransferT]):
    """A :class:`swap_core.SwapDevice` that leaves everything to another one.

    Subclasses add to single verbs; :attr:`swap_core.Pipeline.device` takes one for a while.

    Args:
        inner: The device that does the work.
    """

    def __init__(self, inner: SwapDevice[StreamT, EventT, MemoryT, TransferT]) -> None:
        self.inner = inner

    @property
    def load_stream(self) -> StreamT:
        """The inner device's."""
        return self.inner.load_stream

    @property
    def store_stream(self) -> StreamT:
        """The inner device's."""
        return self.inner.store_stream

    @property
    def out_of_memory(self) -> type[Exception]:
        """The inner device's."""
        return self.inner.out_of_memory

    def compute_stream(self) -> StreamT:
        """The inner device's."""
        return self.inner.compute_stream()

    def create_event(self) -> EventT:
        """Leave it to the inner device."""
        return self.inner.create_event()

    def record(self, event: EventT, stream: StreamT) -> None:
        """Leave it to the inner device."""
        self.inner.record(event, stream)

    def wait(self, stream: StreamT, event: EventT) -> None:
        """Leave it to the inner device."""
        self.inner.wait(stream, event)

    def synchronize(self, event: EventT) -> None:
        """Leave it to the inner device."""
        self.inner.synchronize(event)

    def elapsed(self, start: EventT, end: EventT) -> float:
        """Leave it to the inner device."""
        return self.inner.elapsed(start, end)

    def restore(self, memory: MemoryT) -> None:
        """Leave it to the inner device."""
        self.inner.restore(memory)

    def release(self, memory: MemoryT) -> None:
        """Leave it to the inner device."""
        self.inner.release(memory)

    def release_behind(self, memory: MemoryT, stream: StreamT) -> None:
        """Leave it to the inner device."""
        self.inner.release_behind(memory, stream)

    def copy_in(self, stream: StreamT, transfers: Sequence[TransferT]) -> None:
        """Leave it to the inner device."""
        self.inner.copy_in(stream, transfers)

    def copy_out(self, stream: StreamT, transfers: Sequence[TransferT]) -> None:
        """Leave it to the inner device."""
        self.inner.copy_out(stream, transfers)
