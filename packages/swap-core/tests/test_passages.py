# SPDX-License-Identifier: Apache-2.0
"""Updates that begin early, run backwards, keep their last batch or leave their last store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import permutations, product
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import Residency, StateLostError, SwapInternalError

SIZES = [40, 90, 30, 80, 50]
SO_FEW = {("tail left", "packed"): [40, 90], ("tail left", "per tensor"): [40]}
"""With more batches other waits keep each load behind the store of the update before."""
COVERED = {("everything", "packed"), ("everything", "per tensor")}
"""The wait for earlier stores repeats one: the kept batch was updated after the store before it."""
PRIORITIES = list(permutations(["compute", "load", "store"]))


def plain(rig: Any) -> None:
    rig.run()


def begun_early(rig: Any) -> None:
    rig.pipeline.begin(rig.batches)
    rig.run()


def in_backward(rig: Any) -> None:
    """Two batches are updated before the update is called, last batch first."""
    order = rig.batches[::-1]
    rig.pipeline.begin(order)
    for _ in order[:2]:
        rig.pipeline.proceed(rig.update)
    rig.pipeline.run(order, rig.update, rig.meanwhile)


def zigzag(rig: Any) -> None:
    """The last batch stays, and is the first of the next update."""
    kept_last = rig.batches[-1].residency is Residency.DEVICE
    order = rig.batches[::-1] if kept_last else rig.batches
    rig.pipeline.run(order, rig.update, rig.meanwhile, keep_last=True)


def earlier_stores(rig: Any) -> Any:
    latest = rig.pipeline.latest
    return latest.stored[-1].stored if latest is not None and latest.stored else None


def tail_left(rig: Any) -> None:
    rig.pipeline.run(
        rig.batches, rig.update, rig.meanwhile, after=earlier_stores(rig), leave_tail=True
    )


def everything(rig: Any) -> None:
    latest = rig.pipeline.latest
    backwards = latest is not None and latest.order[-1].index > 0
    order = rig.batches[::-1] if backwards else rig.batches
    rig.pipeline.begin(order, earlier_stores(rig))
    if len(order) > 1:
        rig.pipeline.proceed(rig.update)
    rig.pipeline.run(order, rig.update, rig.meanwhile, keep_last=True, leave_tail=True)


WAYS: dict[str, Callable[[Any], None]] = {
    "plain": plain,
    "begun early": begun_early,
    "in backward": in_backward,
    "zigzag": zigzag,
    "tail left": tail_left,
    "everything": everything,
}

KINDS = pytest.mark.parametrize("kind", ["packed", "per tensor"])
EACH_WAY = pytest.mark.parametrize("way", WAYS)


@KINDS
@EACH_WAY
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=8),
    st.integers(2, 4),
    st.sampled_from(PRIORITIES),
)
@settings(deadline=None, max_examples=60)
def test_every_byte_is_updated_once_per_update_whatever_stream_goes_first(
    recording: ModuleType,
    kind: str,
    way: str,
    sizes: list[int],
    arenas: int,
    priority: tuple[str, ...],
) -> None:
    rig = recording.Rig(kind, sizes, arenas=arenas, device=recording.Recorder(priority))
    for _ in range(4):
        WAYS[way](rig)
    rig.pipeline.bring_home(rig.batches)
    rig.device.drain()
    assert sorted(rig.changed) == sorted([*range(len(sizes))] * 4)
    assert rig.values() == rig.expected()
    assert rig.device.violations == []
    assert (rig.device.held, rig.ledger.device_bytes) == ([], 0)
    assert rig.residencies() == {Residency.HOST}
    assert rig.ledger.updates == 4


@KINDS
@EACH_WAY
def test_no_wait_could_be_left_out(recording: ModuleType, kind: str, way: str) -> None:
    sizes = SO_FEW.get((way, kind), SIZES)

    def is_right_without(wait: int, priority: tuple[str, ...]) -> bool:
        device = recording.Recorder(priority)
        device.forgotten_wait = wait
        rig = recording.Rig(kind, sizes, device=device)
        for _ in range(3):
            WAYS[way](rig)
        rig.pipeline.bring_home(rig.batches)
        device.drain()
        return bool(rig.values() == rig.expected() and not device.violations)

    complete = recording.Rig(kind, sizes)
    WAYS[way](complete)
    first = complete.device.waits
    WAYS[way](complete)
    waits = [call for call in complete.device.calls if call.startswith("wait")]
    needless = [
        waits[wait]
        for wait in range(first, complete.device.waits)
        if all(is_right_without(wait, priority) for priority in PRIORITIES)
    ]
    assert len(needless) == ((way, kind) in COVERED)


@KINDS
@EACH_WAY
def test_whatever_call_fails_nothing_is_lost_or_held_and_the_next_update_works(
    recording: ModuleType, kind: str, way: str
) -> None:
    rig = recording.Rig(kind, SIZES)
    WAYS[way](rig)
    first = len(rig.device.calls)
    WAYS[way](rig)
    calls = rig.device.calls
    cases = product(range(first, len(calls)), PRIORITIES[::5], [False, True])
    for place, priority, after_the_work in cases:
        if after_the_work and calls[place].startswith("restore"):
            continue  # its error means that nothing was taken: that is its contract
        device = recording.Recorder(priority)
        rig = recording.Rig(kind, SIZES, device=device)
        WAYS[way](rig)
        device.fails = lambda number, call, place=place: number == place
        device.fails_after_the_work = after_the_work
        try:
            WAYS[way](rig)
        except RuntimeError as error:
            assert error is device.error  # noqa: PT017  # not every call raises
        else:
            continue  # an error of a verb that the next attempt made good
        assert rig.values() == rig.expected()
        assert rig.residencies() == {Residency.HOST}
        assert (device.held, rig.ledger.device_bytes) == ([], 0)
        rig.run()
        device.drain()
        assert rig.values() == rig.expected()
        assert (device.held, device.violations) == ([], [])


@KINDS
def test_what_began_is_given_up_without_a_copy_out(recording: ModuleType, kind: str) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.pipeline.begin(rig.batches)
    assert rig.device.held
    rig.pipeline.bring_home(rig.batches)
    assert rig.device.held == []
    assert rig.values() == rig.original
    assert rig.ledger.copies_out == 0
    calls = len(rig.device.calls)
    rig.pipeline.bring_home(rig.batches)
    assert len(rig.device.calls) == calls, "nothing to do twice"


@KINDS
def test_a_kept_batch_saves_a_load_and_a_store_and_holds_its_memory(
    recording: ModuleType, kind: str
) -> None:
    rig = recording.Rig(kind, SIZES)
    zigzag(rig)
    assert len(rig.device.held) == 1
    assert rig.ledger.device_bytes == (max(SIZES[0::2]) if kind == "packed" else SIZES[-1])
    zigzag(rig)
    assert rig.ledger.bytes_loaded == 2 * sum(SIZES) - SIZES[-1]
    assert rig.ledger.bytes_stored == 2 * sum(SIZES) - SIZES[-1] - SIZES[0]


@KINDS
def test_a_tail_that_is_left_lets_the_compute_stream_go(recording: ModuleType, kind: str) -> None:
    rig = recording.Rig(kind, SIZES)
    tail_left(rig)
    assert f"wait on compute for stored {len(SIZES) - 1}" not in rig.device.calls
    assert any("behind store" in call for call in rig.device.calls)


@KINDS
def test_a_kept_batch_that_cannot_be_stored_is_told(recording: ModuleType, kind: str) -> None:
    rig = recording.Rig(kind, SIZES)
    zigzag(rig)
    rig.device.fails = lambda number, call: call.startswith("copy_out")
    with pytest.raises(StateLostError, match=r"Batches \[4\] of 5 .* between updates"):
        rig.pipeline.bring_home(rig.batches)


@KINDS
def test_an_update_neither_begins_twice_nor_proceeds_unbegun(
    recording: ModuleType, kind: str
) -> None:
    rig = recording.Rig(kind, SIZES)
    with pytest.raises(SwapInternalError, match="no update began"):
        rig.pipeline.proceed(rig.update)
    rig.pipeline.begin(rig.batches)
    with pytest.raises(SwapInternalError, match="before the one before it is done"):
        rig.pipeline.begin(rig.batches)
    assert rig.residencies() == {Residency.HOST}
    assert rig.device.held == []


def marks(rig: Any) -> list[tuple[str, Any, int]]:
    """What each event of the latest update marks that its times are told by."""
    latest = rig.pipeline.latest
    events = [batch.updated for batch in latest.order]
    events += [batch.loaded for batch in latest.order[latest.resumed :]]
    events += [batch.stored for batch in latest.stored]
    events += [latest.order[0].restored, rig.pipeline.meanwhile_done]
    return [(event.name, event.stream, event.mark) for event in events]


def comes_home(rig: Any) -> None:
    rig.pipeline.bring_home(rig.batches)


def begins_in_vain(rig: Any) -> None:
    order = rig.pipeline.latest.order
    rig.pipeline.begin(order[::-1] if rig.pipeline.latest.kept else order, earlier_stores(rig))
    rig.pipeline.bring_home(rig.batches)


def proceeds_in_vain(rig: Any) -> None:
    order = rig.pipeline.latest.order
    rig.pipeline.begin(order[::-1] if rig.pipeline.latest.kept else order, earlier_stores(rig))
    rig.pipeline.proceed(rig.update)
    rig.pipeline.proceed(rig.update)
    rig.pipeline.bring_home(rig.batches)


def fails_to_begin(rig: Any) -> None:
    fails_in(rig, "copy_in", begins_in_vain)


def fails_to_proceed(rig: Any) -> None:
    fails_in(rig, "copy_out", proceeds_in_vain)


def fails_in(rig: Any, verb: str, action: Callable[[Any], None]) -> None:
    left = [1]
    rig.device.fails = lambda number, call: call.startswith(verb) and bool(left and left.pop())
    with suppress(RuntimeError):  # where a batch was kept there may be nothing to load
        action(rig)
    rig.device.fails = lambda number, call: False


LATER = (comes_home, begins_in_vain, proceeds_in_vain, fails_to_begin, fails_to_proceed)


@KINDS
@EACH_WAY
@pytest.mark.parametrize("later", LATER)
def test_the_events_of_an_update_are_its_own_until_the_next_one_is_done(
    recording: ModuleType, kind: str, way: str, later: Callable[[Any], None]
) -> None:
    rig = recording.Rig(kind, SIZES)
    for number in range(5):
        WAYS[way](rig)
        before, latest = marks(rig), rig.pipeline.latest
        for _ in range(number % 3):
            later(rig)
            assert rig.pipeline.latest is latest
            assert marks(rig) == before
    rig.pipeline.bring_home(rig.batches)
    rig.device.drain()
    assert rig.values() == rig.expected()
    assert rig.device.violations == []


@KINDS
def test_an_update_that_begins_early_needs_no_new_events_in_the_long_run(
    recording: ModuleType, kind: str
) -> None:
    rig = recording.Rig(kind, SIZES)
    for _ in range(2):
        everything(rig)
    rig.device.create_event = None
    for _ in range(3):
        everything(rig)
    rig.pipeline.bring_home(rig.batches)
    assert rig.values() == rig.expected()
