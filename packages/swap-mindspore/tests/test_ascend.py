# SPDX-License-Identifier: Apache-2.0
"""The Ascend device on a stand-in of ``mindspore.runtime`` that writes down what it is asked.

CPU tensors play the card's part, so copies and updates are real; streams and events only leave a
log, in which a happens-before checker looks for accesses that nothing orders. No card was involved:
this shows what would be queued, not what a card does with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from mindspore import Tensor, mint, nn

from swap_core import ALIGNMENT, SwapOptimizerConfig
from swap_mindspore import AscendDevice, ascend_device
from swap_mindspore import ascend as module
from swap_mindspore.adam import MindSporeNativeAdamAdapter
from swap_mindspore.arena import Arena, Piece
from swap_mindspore.device import Memory
from swap_mindspore.engine import SwapEngine
from swap_testkit import Op, check_order
from swap_testkit.mindspore import region_of
from swap_testkit.mindspore.recording import MindSporeRegions


class Stream:
    """Made by the device: first the one that loads, then the one that stores."""

    made: ClassVar[list[Stream]] = []

    def __init__(self) -> None:
        self.name = ("load", "store", "compute")[len(Stream.made)]
        Stream.made.append(self)


class Event:
    made: ClassVar[int] = 0
    log: ClassVar[list[Op]] = []
    waits: ClassVar[int] = 0
    without_wait: ClassVar[int | None] = None
    """Number of the wait that is left out."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing
        self.number = Event.made
        Event.made += 1

    def record(self, stream: Stream) -> None:
        Event.log.append(Op("record", stream.name, self.number))

    def wait(self, stream: Stream) -> None:
        if Event.waits != Event.without_wait:
            Event.log.append(Op("wait", stream.name, self.number))
        Event.waits += 1

    def synchronize(self) -> None:
        Event.log.append(Op("synchronize", "host", self.number))

    def elapsed_time(self, end: Event) -> float:
        return float(end.number - self.number)


class StandIn:
    """The part of ``mindspore.runtime`` that the device uses, by its documented names."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        Stream.made, Event.made, Event.log, Event.waits = [], 0, [], 0
        Event.without_wait = None
        self.compute = SimpleNamespace(name="compute")
        self.current: Any = self.compute
        self.synchronized = 0
        self.non_blocking: list[bool] = []
        """Of each copy on a stream of its own."""
        self.regions = MindSporeRegions()
        self.copies = True
        """Whether copies are made, and not only logged."""

    def current_stream(self) -> Any:
        return self.current

    def synchronize(self) -> None:
        self.synchronized += 1

    @contextmanager
    def StreamCtx(self, stream: Any) -> Iterator[None]:  # noqa: N802  # MindSpore's name
        self.current, before = stream, self.current
        yield
        self.current = before


@pytest.fixture
def runtime(monkeypatch) -> StandIn:
    """The stand-in, in place for the Ascend device; pinned memory is plain, copies are logged."""
    stand_in = StandIn()
    copy, fill, drain = Tensor.copy_, module.fill_storages, module.empty_storages

    def empty(shape: Any, *, dtype: Any, device: str, pin_memory: bool = False) -> Tensor:
        assert device == "Ascend" or pin_memory or tuple(shape) == (0,)  # the shell of a view
        return mint.empty(shape, dtype=dtype)

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if stand_in.current is not stand_in.compute:
            stand_in.non_blocking.append(non_blocking)
            note("copy", reads=[source], writes=[self])
        return copy(self, source) if stand_in.copies else self

    def note(verb: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        of = stand_in.regions.of_tensor
        regions = (tuple(map(of, reads)), tuple(map(of, writes)))
        Event.log.append(Op(verb, stand_in.current.name, None, *regions))

    def note_memory(verb: str, memory: Memory) -> None:
        regions = tuple(stand_in.regions.of_memory(memory))
        Event.log.append(Op(verb, stand_in.current.name, None, (), regions))

    def restore(memory: Memory) -> None:
        note_memory("restore", memory)
        fill(memory)

    def release(memory: Memory) -> None:
        note_memory("release", memory)
        drain(memory)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(module, "runtime", stand_in)
    monkeypatch.setattr(module, "mint", SimpleNamespace(empty=empty))
    monkeypatch.setattr(module, "fill_storages", restore)
    monkeypatch.setattr(module, "empty_storages", release)
    return stand_in


def wrapped(kit, runtime: StandIn, monkeypatch, swap_times: int):
    device = AscendDevice()
    device.target = "CPU"  # type: ignore[misc]  # whose tensors play the card's part
    pair = kit.make_twins(nn.Adam, device=device, swap_times=swap_times)
    adapter = pair.swapped._swap.adapter
    step_batch = adapter.step_batch

    def logged(step: Any, call: Any) -> None:
        touched = tuple(region_of(t) for m in call.members for t in m.states.values())
        assert runtime.current is runtime.compute
        Event.log.append(Op("update", "compute", reads=touched, writes=touched))
        step_batch(step, call)

    monkeypatch.setattr(adapter, "step_batch", logged)
    Event.log.clear()
    return pair


@pytest.mark.parametrize("swap_times", [1, 2, 3, 6])
def test_everything_is_ordered_and_nothing_blocks_but_the_end(
    kit, runtime, monkeypatch, swap_times
) -> None:
    pair = wrapped(kit, runtime, monkeypatch, swap_times)
    waited = runtime.synchronized
    pair.step(2)
    assert check_order(Event.log) == []
    assert runtime.synchronized == waited  # no synchronisation of the device in an update
    hosts = [op for op in Event.log if op.verb == "synchronize"]
    assert len(hosts) == 2  # one event in each update, the last
    ends = [i for i, op in enumerate(Event.log) if op.verb == "synchronize"]
    assert Event.log[ends[0] - 1].verb in ("wait", "release", "record")
    assert len(runtime.non_blocking) == 2 * 2 * 12
    assert all(runtime.non_blocking)
    copies = [op.stream for op in Event.log if op.verb == "copy"]
    assert copies.count("load") == copies.count("store") == 2 * 12
    assert [stream.name for stream in Stream.made] == ["load", "store"]


def test_batch_i_plus_1_is_loaded_before_batch_i_is_updated(kit, runtime, monkeypatch) -> None:
    pair = wrapped(kit, runtime, monkeypatch, 6)
    pair.step(1)
    work = [op for op in Event.log if op.verb in ("copy", "update") and (op.reads or op.writes)]
    order = "".join({"load": "l", "store": "s", "compute": "u"}[op.stream] for op in work)
    assert order == "ll" + "lluss" * 5 + "uss"


def test_every_wait_is_necessary(kit, runtime, monkeypatch) -> None:
    pair = wrapped(kit, runtime, monkeypatch, 3)
    pair.step(1)
    Event.waits, count = 0, Event.waits
    missed = []
    for left_out in range(count):
        Event.log.clear()
        Event.waits, Event.without_wait = 0, left_out
        pair.step(2)  # what a missing wait lets loose may only show in the next update
        Event.without_wait = None
        if not check_order(Event.log):
            missed.append(left_out)
    assert count == 3 * 4
    assert missed == []


def packed_engine(kit, runtime: StandIn, monkeypatch, swap_times: int):
    """Packed, without its copies and updates: on the CPU writes into views change nothing.

    With nn.Adam, which users cannot have packed: its states do as well as others.
    """
    device = AscendDevice()
    device.target = "CPU"  # type: ignore[misc]
    optimizer = nn.Adam(kit.parameters(), 0.01)
    adapter = MindSporeNativeAdamAdapter(optimizer)
    make = device.allocate_arena

    def noted(nbytes: int, pieces: Sequence[Piece]) -> Arena:
        arena = make(nbytes, pieces)
        runtime.regions.note(arena)
        return arena

    monkeypatch.setattr(device, "allocate_arena", noted)
    config = SwapOptimizerConfig(packed_swap=True, min_numel=0, swap_times=swap_times)
    runtime.copies = False
    engine = SwapEngine(adapter, config, device)

    def logged(step: Any, call: Any) -> None:
        states = [t for member in call.members for t in member.states.values()]
        touched = tuple(map(runtime.regions.of_tensor, states))
        Event.log.append(Op("update", "compute", reads=touched, writes=touched))

    monkeypatch.setattr(adapter, "step_batch", logged)
    Event.log.clear()
    return optimizer, engine


@pytest.mark.parametrize("swap_times", [1, 2, 3, 6])
def test_packed_is_ordered_with_one_copy_each_way_per_batch(
    kit, runtime, monkeypatch, swap_times
) -> None:
    optimizer, engine = packed_engine(kit, runtime, monkeypatch, swap_times)
    for step in range(2):
        engine.step(kit.gradients(optimizer.parameters, step))
    assert check_order(Event.log) == []
    copies = [op.stream for op in Event.log if op.verb == "copy"]
    assert copies.count("load") == copies.count("store") == 2 * swap_times
    assert all(runtime.non_blocking)
    arenas = {id(batch.memory): batch.memory for batch in engine._plan.lane.batches}.values()
    assert len(arenas) == min(2, swap_times)
    for arena in arenas:
        assert arena._bytes.untyped_storage().nbytes() == 0
        # By address: MindSpore 2.8 goes on telling the former size of a view.
        assert [view.untyped_storage().data_ptr() for view in arena.views] == [0] * len(arena.views)


def test_every_wait_of_packed_is_necessary(kit, runtime, monkeypatch) -> None:
    optimizer, engine = packed_engine(kit, runtime, monkeypatch, 4)
    given = kit.gradients(optimizer.parameters, 0)
    Event.waits = 0
    engine.step(given)
    count, missed = Event.waits, []
    for left_out in range(count):
        Event.log.clear()
        Event.waits, Event.without_wait = 0, left_out
        for _ in range(2):  # what a missing wait lets loose may only show in the next update
            engine.step(given)
        Event.without_wait = None
        if not check_order(Event.log):
            missed.append(left_out)
    assert count == 1 + 4 * 2 + 2 + 1
    assert missed == []


def test_segments_and_arenas_are_views_of_one_memory(runtime) -> None:
    import mindspore as ms

    device = AscendDevice()
    pieces = [Piece(0, (3, 5), ms.float32), Piece(ALIGNMENT, (7,), ms.float32)]
    whole, parts = device.allocate_segment(ms.float32, 2 * ALIGNMENT, pieces)
    assert whole.nbytes == 2 * ALIGNMENT
    arena = device.allocate_arena(2 * ALIGNMENT, pieces)
    arena.fill()
    for tensors, base in ((parts, whole), (arena.views, arena._bytes)):
        assert [t.data_ptr() - base.data_ptr() for t in tensors] == [0, ALIGNMENT]
        assert [tuple(t.shape) for t in tensors] == [(3, 5), (7,)]
    assert [part.storage_offset() for part in parts] == [0, ALIGNMENT // 4]
    arena.views[0].set_data(mint.empty((3, 5)))  # as if it had not followed its base
    arena.empty()
    arena.fill()
    assert arena.views[0].data_ptr() == arena._bytes.data_ptr()
    arena.empty()
    assert arena._bytes.untyped_storage().nbytes() == 0


def test_times_are_seconds(kit, runtime, monkeypatch) -> None:
    pair = wrapped(kit, runtime, monkeypatch, 2)
    pair.step(1)
    report = pair.swapped.swap_report()
    assert report.pinned
    assert report.last_step is not None
    assert 0 < report.last_step.total < 1  # the stand-in's milliseconds are event numbers


def test_pinning_that_fails_falls_back_with_one_warning(kit, runtime, monkeypatch) -> None:
    """MindSpore reports it at the next synchronisation, not at the call."""

    def fail() -> None:
        raise RuntimeError("aclrtMallocHost failed")

    monkeypatch.setattr(runtime, "synchronize", fail)
    monkeypatch.setattr(
        module,
        "mint",
        SimpleNamespace(empty=lambda shape, dtype, **_: mint.empty(shape, dtype=dtype)),
    )
    device = AscendDevice()
    device.target = "CPU"  # type: ignore[misc]
    with pytest.warns(RuntimeWarning, match="copies no longer overlap") as warned:
        pair = kit.make_twins(nn.Adam, device=device)
    assert len(warned) == 1
    pair.step(1)
    assert not pair.swapped.swap_report().pinned


def test_one_device_per_process_and_only_on_a_card(runtime, monkeypatch, kit) -> None:
    ascend_device.cache_clear()
    from swap_mindspore import eligibility

    assert eligibility.default_device() is None
    context = {"device_target": "Ascend"}
    fake = SimpleNamespace(get_context=context.get)
    monkeypatch.setattr(eligibility, "ms", fake)
    assert eligibility.default_device() is eligibility.default_device() is ascend_device()
    assert len(Stream.made) == 2
    ascend_device.cache_clear()
