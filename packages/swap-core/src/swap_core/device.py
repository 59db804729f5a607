# SPDX-License-Identifier: Apache-2.0
"""The dumb verbs that a pipeline needs of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["SwapDevice"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT_contra = TypeVar("MemoryT_contra", contravariant=True)
TransferT_contra = TypeVar("TransferT_contra", contravariant=True)


class SwapDevice(Protocol[StreamT, EventT, MemoryT_contra, TransferT_contra]):
    """One device with a compute stream, a load stream and a store stream.

    Handles are opaque to the core: a *stream* is an in-order queue of device work, an *event*
    marks a place in one, a *memory* is device memory that can be given back and taken again, a
    *transfer* is a bound pair of device bytes and host bytes of one size.

    No verb blocks the host, except :meth:`synchronize` and what the framework itself blocks on.
    """

    @property
    def load_stream(self) -> StreamT:
        """The stream of host-to-device copies; one per device, made once."""
        ...

    @property
    def store_stream(self) -> StreamT:
        """The stream of device-to-host copies; one per device, made once."""
        ...

    @property
    def out_of_memory(self) -> type[Exception]:
        """What :meth:`restore` raises when the device is full; takes a message."""
        ...

    def compute_stream(self) -> StreamT:
        """The stream on which the caller's work runs now."""
        ...

    def create_event(self) -> EventT:
        """Make an event. It may be recorded again and again; a wait means the latest record."""
        ...

    def record(self, event: EventT, stream: StreamT) -> None:
        """Let ``event`` mark the work that ``stream`` has been given so far."""
        ...

    def wait(self, stream: StreamT, event: EventT) -> None:
        """Let later work of ``stream`` start after the work that ``event`` marks."""
        ...

    def synchronize(self, event: EventT) -> None:
        """Block the host until the work that ``event`` marks is done."""
        ...

    def elapsed(self, start: EventT, end: EventT) -> float:
        """Seconds between two events that have happened."""
        ...

    def restore(self, memory: MemoryT_contra) -> None:
        """Take device memory again; its contents are undefined.

        It is valid on the compute stream; other streams must wait for an event recorded there
        afterwards.
        """
        ...

    def release(self, memory: MemoryT_contra) -> None:
        """Give device memory back, in the order of the compute stream. Nothing to do twice."""
        ...

    def release_behind(self, memory: MemoryT_contra, stream: StreamT) -> None:
        """Give device memory back once ``stream`` did the work that it has been given so far.

        Nobody waits: an allocator that knows streams keeps the memory until then (torch's
        ``Tensor.record_stream``). A device without one lets the compute stream wait, and releases.
        """
        ...

    def copy_in(self, stream: StreamT, transfers: Sequence[TransferT_contra]) -> None:
        """Queue copies from host to device on ``stream``."""
        ...

    def copy_out(self, stream: StreamT, transfers: Sequence[TransferT_contra]) -> None:
        """Queue copies from device to host on ``stream``."""
        ...
