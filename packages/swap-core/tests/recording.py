# SPDX-License-Identifier: Apache-2.0
"""A device of byte arrays: it writes every verb down, and runs queued work as late as it may.

Work runs only when the host waits for it or at :meth:`Recorder.drain`, in the most one-sided order
that the recorded waits allow. So a missing wait shows as wrong bytes, not as luck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from swap_core import Batch, Ledger, PackedPipeline, PerTensorPipeline, Pipeline, Residency

NEXT = bytes((5 * byte + 1) % 256 for byte in range(256))
"""What an update makes of each byte; every byte changes."""

GARBAGE = b"\xee"


@dataclass(eq=False)
class Stream:
    name: str
    queue: deque[Callable[[], bool]] = field(default_factory=deque)
    queued: int = 0
    done: int = 0


@dataclass(eq=False)
class Event:
    name: str
    stream: Stream | None = None
    mark: int = 0


@dataclass(eq=False)
class Block:
    """What a restore gives: always another one, as an allocator may."""

    data: bytearray
    live: bool = False
    """The work is between the restore and the release."""


@dataclass(eq=False)
class Memory:
    name: str
    nbytes: int
    block: Block = field(init=False)

    def __post_init__(self) -> None:
        self.block = Block(bytearray(self.nbytes))


@dataclass(eq=False)
class Transfer:
    name: str
    memory: Memory
    device: slice
    host: bytearray


class Recorder:
    """A ``SwapDevice``.

    Args:
        priority: Streams; the first that can run does.
    """

    out_of_memory = MemoryError

    def __init__(self, priority: Sequence[str] = ("compute", "load", "store")) -> None:
        self.streams = {name: Stream(name) for name in priority}
        self.load_stream = self.streams["load"]
        self.store_stream = self.streams["store"]
        self.calls: list[str] = []
        self.fails: Callable[[int, str], bool] = lambda number, call: False
        self.error: BaseException = RuntimeError("planted")
        self.fails_after_the_work = False
        self.forgotten_wait = -1
        self.waits = 0
        self.held: list[str] = []
        self.violations: list[str] = []

    @contextmanager
    def verb(self, call: str) -> Iterator[None]:
        """Write the call down and raise where an error is planted, before or after the work."""
        planted = self.fails(len(self.calls), call)
        self.calls.append(call)
        if planted and not self.fails_after_the_work:
            raise self.error
        yield
        if planted:
            raise self.error

    def compute_stream(self) -> Stream:
        return self.streams["compute"]

    def create_event(self) -> Event:
        # A batch names its first events itself; the pipeline records no other in a plain update.
        return Event("meanwhile done")

    def elapsed(self, start: Event, end: Event) -> float:
        raise NotImplementedError

    def record(self, event: Event, stream: Stream) -> None:
        with self.verb(f"record {event.name} on {stream.name}"):
            event.stream, event.mark = stream, stream.queued

    def wait(self, stream: Stream, event: Event) -> None:
        with self.verb(f"wait on {stream.name} for {event.name}"):
            target, mark = event.stream, event.mark
            if target is not None and self.waits != self.forgotten_wait:
                self.queue(stream, lambda: target.done >= mark)
            self.waits += 1

    def synchronize(self, event: Event) -> None:
        with self.verb(f"synchronize {event.name}"):
            while event.stream is not None and event.stream.done < event.mark:
                self._run_one()

    def restore(self, memory: Memory) -> None:
        with self.verb(f"restore {memory.name}"):
            self.held.append(memory.name)
            memory.block = Block(bytearray(memory.nbytes))
            self.queue(self.compute_stream(), partial(self._set_live, memory.block, True))

    def release(self, memory: Memory) -> None:
        with self.verb(f"release {memory.name}"):
            if memory.name in self.held:
                self.held.remove(memory.name)
                self.queue(self.compute_stream(), partial(self._set_live, memory.block, False))

    def release_behind(self, memory: Memory, stream: Stream) -> None:
        with self.verb(f"release {memory.name} behind {stream.name}"):
            if memory.name in self.held:
                self.held.remove(memory.name)
                self.queue(stream, partial(self._set_live, memory.block, False))

    def copy_in(self, stream: Stream, transfers: Sequence[Transfer]) -> None:
        with self.verb(f"copy_in {transfers[0].name} on {stream.name}"):
            for transfer in transfers:
                self.queue(stream, partial(self._copy_in, transfer, transfer.memory.block))

    def copy_out(self, stream: Stream, transfers: Sequence[Transfer]) -> None:
        with self.verb(f"copy_out {transfers[0].name} on {stream.name}"):
            for transfer in transfers:
                self.queue(stream, partial(self._copy_out, transfer, transfer.memory.block))

    def queue(self, stream: Stream, task: Callable[[], bool]) -> None:
        """Let ``stream`` call ``task`` until it returns True: False means that it must wait."""
        stream.queue.append(task)
        stream.queued += 1

    def drain(self) -> None:
        """Run everything."""
        while any(stream.queue for stream in self.streams.values()):
            self._run_one()

    def _run_one(self) -> None:
        for stream in self.streams.values():
            if stream.queue and stream.queue[0]():
                stream.queue.popleft()
                stream.done += 1
                return
        raise AssertionError("deadlock: every stream waits for another one")

    def _set_live(self, block: Block, live: bool) -> bool:
        block.live = live
        block.data[:] = GARBAGE * len(block.data)
        return True

    def _copy_in(self, transfer: Transfer, block: Block) -> bool:
        self.check(transfer, block, "loaded into")
        block.data[transfer.device] = transfer.host
        return True

    def _copy_out(self, transfer: Transfer, block: Block) -> bool:
        self.check(transfer, block, "stored from")
        transfer.host[:] = block.data[transfer.device]
        return True

    def check(self, transfer: Transfer, block: Block, use: str) -> None:
        if not block.live:
            self.violations.append(f"{transfer.memory.name} is {use} while it is not held")


class Rig:
    """A pipeline on a :class:`Recorder`, with batches of two transfers each and real bytes.

    Args:
        kind: ``packed`` or ``per tensor``.
        sizes: Bytes of each batch, each > 1.
        arenas: Size of the ring of the packed pipeline.
        device: Default: a new one.
    """

    def __init__(
        self, kind: str, sizes: Sequence[int], *, arenas: int = 2, device: Recorder | None = None
    ) -> None:
        self.device = device or Recorder()
        self.ledger = Ledger()
        self.changed: list[int] = []  # batches whose update was queued, over all runs
        self.ring = [Memory(f"arena {i}", max(sizes[i::arenas], default=0)) for i in range(arenas)]
        self.batches = [self._batch(kind, i, nbytes) for i, nbytes in enumerate(sizes)]
        self.original = self.values()
        self.pipeline: Pipeline[Stream, Event, Memory, Transfer] = (
            PackedPipeline(self.device, self.ledger, [(m, m.nbytes) for m in self.ring])
            if kind == "packed"
            else PerTensorPipeline(self.device, self.ledger)
        )

    def _batch(self, kind: str, index: int, nbytes: int) -> Batch[Event, Memory, Transfer]:
        own = Memory(f"batch {index}", nbytes)
        memory = self.ring[index % len(self.ring)] if kind == "packed" else own
        bytes_ = bytearray((7 * position + 31 * index) % 256 for position in range(nbytes))
        cut = nbytes // 2
        return Batch(
            index=index,
            nbytes=nbytes,
            memory=memory,
            transfers=(
                Transfer(str(index), memory, slice(0, cut), bytes_[:cut]),
                Transfer(str(index), memory, slice(cut, nbytes), bytes_[cut:]),
            ),
            restored=Event(f"restored {index}"),
            loaded=Event(f"loaded {index}"),
            updated=Event(f"updated {index}"),
            stored=Event(f"stored {index}"),
        )

    def run(self) -> None:
        self.pipeline.run(self.batches, self.update, self.meanwhile)

    def update(self, index: int) -> None:
        with self.device.verb(f"update {index}"):
            self.changed.append(index)
            for transfer in self.batches[index].transfers:
                change = partial(self._change, transfer, transfer.memory.block)
                self.device.queue(self.device.compute_stream(), change)

    def meanwhile(self) -> None:
        with self.device.verb("meanwhile"):
            pass

    def _change(self, transfer: Transfer, block: Block) -> bool:
        self.device.check(transfer, block, "updated")
        block.data[transfer.device] = block.data[transfer.device].translate(NEXT)
        return True

    def values(self) -> list[bytes]:
        """The host bytes of each batch, as they are now."""
        return [b"".join(bytes(t.host) for t in batch.transfers) for batch in self.batches]

    def expected(self) -> list[bytes]:
        """The host bytes after every update that was queued."""
        values = list(self.original)
        for index in self.changed:
            values[index] = values[index].translate(NEXT)
        return values

    def residencies(self) -> set[Residency]:
        return {batch.residency for batch in self.batches}
