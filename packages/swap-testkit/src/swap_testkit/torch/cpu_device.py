# SPDX-License-Identifier: Apache-2.0
"""CPU tensors in the role of device tensors, for machines without an accelerator."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from time import perf_counter
from typing import final

import torch

from swap_core import HostRounding
from swap_torch import DeviceMemory, Transfer

__all__ = ["CopySchedule", "CpuAsDevice", "CpuEvent", "CpuStream"]


class CopySchedule(Enum):
    """When queued copies run. Every choice obeys the waits that were recorded, and only those."""

    EARLIEST = "earliest"
    """At once."""
    LATEST = "latest"
    """When something that waits for them runs: a missing wait shows as data that is not there."""
    RANDOM = "random"
    """A random number of the queued tasks, at random moments; seeded."""


@final
@dataclass(slots=True)
class CpuStream:
    """An in-order queue. The compute stream is the host itself: its queue is always empty."""

    name: str
    tasks: deque[Callable[[], None]] = field(default_factory=deque)
    queued: int = 0
    done: int = 0


@final
@dataclass(slots=True)
class CpuEvent:
    """A place in a stream: after the task with number ``mark``."""

    stream: CpuStream | None = None
    mark: int = 0
    happened_at: float = 0.0
    """Seconds on the host's clock; 0 until it happened."""


@final
class CpuAsDevice:
    """A device whose memory is CPU memory, for ``swap_optimizer(..., device=CpuAsDevice())``.

    Parameters on the CPU count as parameters on this device. "Device" memory is freed and restored
    for real (``storage.resize_``), host mirrors are other CPU tensors, and bytes are counted. It
    shows that results are right, that memory is released and how much is moved. It shows nothing
    about speed, and an update runs in program order, as the host does: for orders between
    streams see :func:`swap_testkit.check_order`.

    A copy that touches freed memory raises. An update that does crashes the process, as CPU tensors
    do; with ``poison`` it computes NaN, since memory is filled instead of freed.

    Args:
        schedule: When copies run.
        seed: For :attr:`CopySchedule.RANDOM`.
        poison: Fill memory with NaN instead of freeing it, and when it is restored.
        limit: Bytes of device memory for states; more raises ``torch.OutOfMemoryError``.
    """

    torch_device = torch.device("cpu")
    host_rounding = HostRounding.EXACT
    out_of_memory = torch.OutOfMemoryError
    pinned = False

    def __init__(
        self,
        *,
        schedule: CopySchedule = CopySchedule.EARLIEST,
        seed: int = 0,
        poison: bool = False,
        limit: int | None = None,
    ) -> None:
        self.schedule = schedule
        self.poison = poison
        self.limit = limit
        self.load_stream = CpuStream("load")
        self.store_stream = CpuStream("store")
        self.held_bytes = 0
        """Device bytes of states now."""
        self.peak_bytes = 0
        """Most device bytes of states so far; set it to ``held_bytes`` to measure anew."""
        self.host_bytes = 0
        """Bytes of host mirrors that are alive."""
        self.copies_in = 0
        self.copies_out = 0
        self.restores = 0
        self.host_allocations = 0
        self._compute = CpuStream("compute")
        self._random = random.Random(seed)
        self._held: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> CpuAsDevice:
        """A device is a place: a copied optimizer is on the same one."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """What is still queued is done before a pickle is made."""
        for stream in (self.load_stream, self.store_stream):
            self._run_until(stream, stream.queued)
        return self.__dict__

    # Streams and events.

    def compute_stream(self) -> CpuStream:
        """The host's own program order."""
        return self._compute

    @property
    def update_stream(self) -> CpuStream:
        """The host's own program order: there is no other."""
        return self._compute

    def as_current(self, stream: CpuStream) -> AbstractContextManager[object]:
        """The host's own program order stays what it is."""
        return nullcontext()

    def create_event(self) -> CpuEvent:
        """Make an event that has happened."""
        return CpuEvent()

    def record(self, event: CpuEvent, stream: CpuStream) -> None:
        """Let ``event`` happen once everything queued on ``stream`` so far ran."""
        event.stream, event.mark, event.happened_at = stream, stream.queued, 0.0
        self._queue(stream, lambda: self._happen(event, stream))

    def wait(self, stream: CpuStream, event: CpuEvent) -> None:
        """Let later tasks of ``stream`` run after ``event``; for the compute stream that is now."""
        target, mark = event.stream, event.mark
        if target is not None:
            # The event itself is a task too, the one after ``mark``.
            self._queue(stream, lambda: self._run_until(target, mark + 1))

    def synchronize(self, event: CpuEvent) -> None:
        """Run everything that ``event`` is after."""
        if event.stream is not None:
            self._run_until(event.stream, event.mark + 1)

    def elapsed(self, start: CpuEvent, end: CpuEvent) -> float:
        """Seconds on the host's clock."""
        return end.happened_at - start.happened_at

    # Memory.

    def restore(self, memory: DeviceMemory) -> None:
        """Take the bytes, all or none."""
        new = [
            (storage, nbytes)
            for storage, nbytes in zip(memory.storages, memory.sizes, strict=True)
            if storage._cdata not in self._held
        ]
        wanted = sum(nbytes for _, nbytes in new)
        if self.limit is not None and self.held_bytes + wanted > self.limit:
            raise torch.OutOfMemoryError(
                f"CpuAsDevice: {wanted:,} bytes wanted, {self.held_bytes:,} held, "
                f"limit {self.limit:,}"
            )
        for storage, nbytes in new:
            storage.resize_(nbytes)
            if self.poison:
                _fill(storage)
            self._hold(storage, nbytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.restores += 1

    def release(self, memory: DeviceMemory) -> None:
        """Give the bytes back."""
        for storage in memory.storages:
            if storage._cdata not in self._held:
                continue
            self._held[storage._cdata]()
            if self.poison:
                _fill(storage)
            else:
                storage.resize_(0)

    def release_behind(self, memory: DeviceMemory, stream: CpuStream) -> None:
        """Give the bytes back, after what is queued on ``stream``: that runs now."""
        self._run_until(stream, stream.queued)
        self.release(memory)

    def memory_info(self) -> tuple[int, int]:
        """What states never took of the limit, and the limit; without one nothing is free."""
        limit = self.limit or 0
        return max(0, limit - self.peak_bytes), limit

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate zeroed CPU memory and count it until its last view is gone."""
        block = torch.zeros(nbytes, dtype=torch.uint8)
        self.host_allocations += 1
        self.host_bytes += nbytes
        weakref.finalize(block.untyped_storage(), self._host_freed, nbytes)
        return block

    # Copies.

    def copy_in(self, stream: CpuStream, transfers: Sequence[Transfer]) -> None:
        """Queue copies into "device" tensors."""
        for device, host in transfers:
            self.copies_in += 1
            self._queue(stream, partial(self._copy, device, host, device))

    def copy_out(self, stream: CpuStream, transfers: Sequence[Transfer]) -> None:
        """Queue copies out of "device" tensors."""
        for device, host in transfers:
            self.copies_out += 1
            self._queue(stream, partial(self._copy, host, device, device))

    def _copy(self, to: torch.Tensor, source: torch.Tensor, device: torch.Tensor) -> None:
        if device.untyped_storage()._cdata not in self._held:
            raise RuntimeError(
                f"CpuAsDevice: a copy of {device.nbytes:,} bytes touches device memory that is "
                f"freed. A wait is missing, or memory is released too early."
            )
        to.copy_(source)

    def _hold(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Count a storage until it is released, or gone."""
        self.held_bytes += nbytes
        self._held[storage._cdata] = weakref.finalize(storage, self._drop, storage._cdata, nbytes)

    def _drop(self, number: int, nbytes: int) -> None:
        del self._held[number]
        self.held_bytes -= nbytes

    def _host_freed(self, nbytes: int) -> None:
        self.host_bytes -= nbytes

    # Running tasks.

    def _queue(self, stream: CpuStream, task: Callable[[], None]) -> None:
        stream.tasks.append(task)
        stream.queued += 1
        if stream is self._compute or self.schedule is CopySchedule.EARLIEST:
            self._run_until(stream, stream.queued)
        elif self.schedule is CopySchedule.RANDOM and self._random.random() < 0.35:
            for other in (self.load_stream, self.store_stream):
                self._run_until(other, other.done + self._random.randint(0, len(other.tasks)))

    def _run_until(self, stream: CpuStream, mark: int) -> None:
        while stream.done < mark and stream.tasks:
            task = stream.tasks.popleft()
            stream.done += 1
            task()

    def _happen(self, event: CpuEvent, stream: CpuStream) -> None:
        # Recorded again before it happened: the earlier record is forgotten, as on a device.
        if event.stream is stream and event.mark == stream.done - 1:
            event.happened_at = perf_counter()


def _fill(storage: torch.UntypedStorage) -> None:
    """Fill with 0xFF: two, four or eight of them are NaN in every floating point type."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
