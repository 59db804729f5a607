# SPDX-License-Identifier: Apache-2.0
"""Watch pipelines at work: a device around the device, and what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar, final

from swap_core.__about__ import __version__
from swap_core.batch import Batch
from swap_core.decorator import DeviceDecorator
from swap_core.device import SwapDevice
from swap_core.pipeline import Pipeline
from swap_core.trace import TraceLane, TraceSpan, check_trace_file, whole_or_none, write_trace

__all__ = ["Tracer", "TracingDevice"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")

_Device = SwapDevice[Any, Any, Any, Any]
_Batches = Sequence[Batch[Any, Any, Any]]


class _Seen(NamedTuple):
    """A span between two events, whose times are known once they happened."""

    lane: TraceLane
    name: str
    start: Any
    end: Any
    batch: int | None
    nbytes: int
    update: int


@final
class TracingDevice(
    DeviceDecorator[StreamT, EventT, MemoryT, TransferT],
    Generic[StreamT, EventT, MemoryT, TransferT],
):
    """A :class:`swap_core.SwapDevice` that does what another one does, and notes when.

    Work of streams is timed by the device, between events of its own that it records around it; so
    it takes a little longer than untraced. Work of the host is timed by the host's clock.

    Args:
        inner: The device that does the work.
        name: How the trace calls it.
    """

    def __init__(self, inner: SwapDevice[StreamT, EventT, MemoryT, TransferT], name: str) -> None:
        super().__init__(inner)
        self.name = name
        self.update = 0
        """The update that began and is not done, from 1; 0 outside."""
        self._batches: dict[int, tuple[int | None, int]] = {}
        self._labels: dict[int, str] = {}
        self._kept: list[object] = []
        self._seen: list[_Seen] = []
        self._host: list[TraceSpan] = []
        self._began = self._mark(inner.compute_stream())
        inner.synchronize(self._began)
        self._began_at = perf_counter()
        self._since = self._began

    def introduce(self, batches: _Batches, meanwhile_done: object) -> None:
        """Tell which events and copies belong to which batch.

        Args:
            batches: Of one plan.
            meanwhile_done: The event of their pipeline.
        """
        self._kept += [*batches, meanwhile_done]  # names are by identity
        self._labels[id(meanwhile_done)] = "update of states that stay"
        self.name_events(batches)

    def name_events(self, batches: _Batches) -> None:
        """Tell of batches that were introduced which events they record from now on."""
        for batch in batches:
            self._batches[id(batch.transfers)] = batch.index, batch.nbytes
            self._batches[id(batch.updated)] = batch.index, batch.nbytes
            self._labels[id(batch.loaded)] = f"load[{batch.index}]"
            self._labels[id(batch.updated)] = f"update[{batch.index}]"
            self._labels[id(batch.stored)] = f"store[{batch.index}]"

    def spans(self, origin: float) -> Iterator[TraceSpan]:
        """Everything seen so far. Blocks the host until it has happened.

        Args:
            origin: When the trace began, by the host's clock.
        """
        for seen in self._seen:
            # Streams that were the compute stream then need not be it now.
            self.inner.synchronize(seen.start)
            self.inner.synchronize(seen.end)
        for seen in self._seen:
            start, end = (self._seconds(event) - origin for event in (seen.start, seen.end))
            yield TraceSpan(
                self.name, seen.lane, seen.name, start, end, seen.batch, seen.nbytes, seen.update
            )
        for span in self._host:
            yield replace(span, start=span.start - origin, end=span.end - origin)

    @contextmanager
    def on_host(self, name: str) -> Iterator[None]:
        """Note what the host does inside ``with``."""
        began = perf_counter()
        try:
            yield
        finally:
            self.note_on_host(name, began, perf_counter())

    def note_on_host(self, name: str, start: float, end: float) -> None:
        """Note what the host did, in seconds of ``perf_counter``."""
        span = TraceSpan(self.name, TraceLane.HOST, name, start, end, update=self.update)
        self._host.append(span)

    # Streams and events.

    def record(self, event: EventT, stream: StreamT) -> None:
        """Record; on the compute stream, this ends an update."""
        self.inner.record(event, stream)
        if self._is_compute(stream):
            began, self._since = self._since, self._mark(stream)
            label = self._labels.get(id(event))
            if label is not None and label.startswith("update"):
                batch, _ = self._batches.get(id(event), (None, 0))
                self._note(TraceLane.UPDATE, label, began, batch)

    def wait(self, stream: StreamT, event: EventT) -> None:
        """Queue a wait; on the compute stream, note how long it takes."""
        if not self._is_compute(stream):
            self.inner.wait(stream, event)
            return
        began = self._mark(stream)
        self.inner.wait(stream, event)
        self._since = self._mark(stream)
        label = self._labels.get(id(event), "a copy")
        self._note(TraceLane.WAIT, f"wait for {label}", began)

    def synchronize(self, event: EventT) -> None:
        """Block the host, and note how long."""
        with self.on_host(f"wait for {self._labels.get(id(event), 'the device')}"):
            self.inner.synchronize(event)

    # Memory and copies.

    def restore(self, memory: MemoryT) -> None:
        """Take memory, and note how long the host takes for it."""
        with self.on_host("restore"):
            self.inner.restore(memory)

    def release(self, memory: MemoryT) -> None:
        """Give memory back."""
        with self.on_host("release"):
            self.inner.release(memory)

    def release_behind(self, memory: MemoryT, stream: StreamT) -> None:
        """Give memory back."""
        with self.on_host("release"):
            self.inner.release_behind(memory, stream)

    def copy_in(self, stream: StreamT, transfers: Sequence[TransferT]) -> None:
        """Queue a load between two events."""
        self._copy(TraceLane.LOAD, self.inner.copy_in, stream, transfers)
        # Where the host itself copies, that is no time of the update that it queues next.
        self._since = self._mark(self.inner.compute_stream())

    def copy_out(self, stream: StreamT, transfers: Sequence[TransferT]) -> None:
        """Queue a store between two events."""
        self._copy(TraceLane.STORE, self.inner.copy_out, stream, transfers)

    def _copy(
        self,
        lane: TraceLane,
        queue: Callable[[StreamT, Sequence[TransferT]], None],
        stream: StreamT,
        transfers: Sequence[TransferT],
    ) -> None:
        batch, nbytes = self._batches.get(id(transfers), (None, 0))
        name = lane.value if batch is None else f"{lane.value}[{batch}]"
        with self.on_host(f"queue {name}"):
            began = self._mark(stream)
            queue(stream, transfers)
            ended = self._mark(stream)
        self._seen.append(_Seen(lane, name, began, ended, batch, nbytes, self.update))

    # Notes.

    def _note(self, lane: TraceLane, name: str, began: EventT, batch: int | None = None) -> None:
        """On the compute stream, until its latest mark."""
        self._seen.append(_Seen(lane, name, began, self._since, batch, 0, self.update))

    def _mark(self, stream: StreamT) -> EventT:
        event = self.inner.create_event()
        self.inner.record(event, stream)
        return event

    def _is_compute(self, stream: StreamT) -> bool:
        # Frameworks make a new object each time that they are asked for the current stream.
        return stream is not self.inner.load_stream and stream is not self.inner.store_stream

    def _seconds(self, event: EventT) -> float:
        """By the host's clock, as nearly as one reading of both clocks tells."""
        return self._began_at + self.inner.elapsed(self._began, event)


@final
class Tracer:
    """Puts tracing devices under pipelines for a while, and writes what they saw.

    Args:
        file: Where to.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = check_trace_file(file)
        self._origin = perf_counter()
        self._devices: dict[int, TracingDevice[Any, Any, Any, Any]] = {}
        self._pipelines: dict[int, tuple[Pipeline[Any, Any, Any, Any], _Device]] = {}
        self._updates = 0
        self._current = 0
        self._early = False
        """Whether the update that is counted last is still to be called."""
        self._update_began = self._origin

    def attach(self, pipeline: Pipeline[Any, Any, Any, Any], batches: _Batches, name: str) -> None:
        """Watch a pipeline from now on.

        Args:
            pipeline: Between two updates, or about to begin its first.
            batches: What it runs.
            name: How the trace calls its device.
        """
        inner = pipeline.device
        if id(inner) not in self._devices:
            self._devices[id(inner)] = TracingDevice(inner, name)
        device = self._devices[id(inner)]
        device.update = self._current
        device.introduce(batches, pipeline.meanwhile_done)
        self._pipelines[id(pipeline)] = pipeline, inner
        pipeline.device = device
        pipeline.on_begin = partial(self._begin_early, device, batches)

    @contextmanager
    def update(self) -> Iterator[None]:
        """What is seen inside ``with`` belongs to one update, also if it raises."""
        self.begin_update()
        try:
            yield
        finally:
            self.end_update()

    def begin_update(self) -> None:
        """What is seen from now on belongs to the next update, or to one that began early."""
        if not self._early:
            self._count_update()
        self._early = False
        self._update_began = perf_counter()

    def end_update(self) -> None:
        """What is seen from now on belongs to no update."""
        for device in self._devices.values():
            device.note_on_host("step", self._update_began, perf_counter())
        self._set_update(0)

    def _begin_early(self, device: TracingDevice[Any, Any, Any, Any], batches: _Batches) -> None:
        """A pipeline begins before the update is called; that of another device may have, too."""
        device.name_events(batches)
        if not self._current:
            self._count_update()
            self._early = True

    def _count_update(self) -> None:
        self._updates += 1
        self._set_update(self._updates)

    def _set_update(self, number: int) -> None:
        self._current = number
        for device in self._devices.values():
            device.update = number

    def finish(self) -> None:
        """Detach from all pipelines, wait for what is seen, and write the file.

        Raises:
            Exception: what the device or the file raised; then there is no file.
        """
        for pipeline, inner in self._pipelines.values():
            pipeline.device, pipeline.on_begin = inner, None
        about = {"swap-core": __version__, "updates": self._updates}
        with whole_or_none(self._file):
            devices = self._devices.values()
            spans = [span for device in devices for span in device.spans(self._origin)]
            write_trace(self._file, spans, about)
