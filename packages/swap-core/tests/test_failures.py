# SPDX-License-Identifier: Apache-2.0
"""Whatever verb of an update fails, nothing is lost, nothing is held, and the next update works."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from swap_core import Residency, StateLostError, restore_or_explain

KINDS = pytest.mark.parametrize("kind", ["packed", "per tensor"])
SIZES = [40, 90, 30, 80, 50]

VERBS = ["restore", "record", "wait", "copy_in", "update", "meanwhile", "copy_out", "release"]
ERRORS = [RuntimeError, KeyboardInterrupt]
PRIORITIES = [("compute", "load", "store"), ("store", "load", "compute")]


def places(recording: ModuleType, kind: str, verb: str) -> list[int]:
    """The numbers of the calls of ``verb`` in an update without errors."""
    rig = recording.Rig(kind, SIZES)
    rig.run()
    found = [i for i, call in enumerate(rig.device.calls) if call.startswith(verb)]
    assert found
    return found


def rigs_after_a_failure(
    recording: ModuleType, kind: str, verb: str, *, after_the_work: bool
) -> Iterator[Any]:
    """Rigs in which just one call of ``verb`` failed: each call, each error, each fast stream."""
    for place in places(recording, kind, verb):
        for error, priority in product(ERRORS, PRIORITIES):
            rig = recording.Rig(kind, SIZES, device=recording.Recorder(priority))
            rig.device.error = error("planted")
            rig.device.fails = lambda number, call, place=place: number == place
            rig.device.fails_after_the_work = after_the_work
            with pytest.raises(error, match="planted") as caught:
                rig.run()
            assert caught.value is rig.device.error
            yield rig


def case(kind: str, verb: str, *, after: bool) -> object:
    when = "after" if after else "before"
    return pytest.param(kind, verb, after, id=f"{kind}, {when} {verb}")


CASES = [
    case(kind, verb, after=after)
    for kind in ("packed", "per tensor")
    for verb in VERBS
    for after in (False, True)
    # An error of restore means that nothing was taken: that is its contract.
    if not (verb == "restore" and after)
]


@pytest.mark.parametrize(("kind", "verb", "after_the_work"), CASES)
def test_loses_and_holds_nothing_when_a_verb_fails_and_goes_on_with_the_next_update(
    recording: ModuleType, kind: str, verb: str, after_the_work: bool
) -> None:
    for rig in rigs_after_a_failure(recording, kind, verb, after_the_work=after_the_work):
        device, ledger = rig.device, rig.ledger
        # The host waited: updated batches have new values already, others their old ones.
        assert rig.values() == rig.expected()
        assert not device.load_stream.queue
        assert not device.store_stream.queue
        assert rig.residencies() == {Residency.HOST}
        assert device.held == []
        assert ledger.device_bytes == 0
        assert ledger.updates == 0

        rig.run()
        device.drain()
        assert rig.values() == rig.expected()
        assert rig.residencies() == {Residency.HOST}
        assert device.held == []
        assert (ledger.updates, ledger.device_bytes) == (1, 0)
        assert device.violations == []


@KINDS
@pytest.mark.parametrize("priority", PRIORITIES)
def test_stores_a_batch_whose_update_failed_half_way(
    recording: ModuleType, kind: str, priority: tuple[str, ...]
) -> None:
    rig = recording.Rig(kind, SIZES, device=recording.Recorder(priority))
    rig.device.fails = lambda number, call: call == "update 2"
    rig.device.fails_after_the_work = True
    with pytest.raises(RuntimeError, match="planted"):
        rig.run()
    assert rig.changed == [0, 1, 2]
    assert rig.values() == rig.expected()


@KINDS
def test_leaves_batches_after_the_failing_one_as_they_were(
    recording: ModuleType, kind: str
) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.device.fails = lambda number, call: call == "update 2"
    with pytest.raises(RuntimeError, match="planted"):
        rig.run()
    new = [old.translate(recording.NEXT) for old in rig.original]
    assert rig.values() == [*new[:2], *rig.original[2:]]


@KINDS
def test_tries_a_failing_store_again(recording: ModuleType, kind: str) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.device.fails = lambda number, call: (
        call == "copy_out 1 on store" and "copy_out 1 on store" not in rig.device.calls
    )
    with pytest.raises(RuntimeError, match="planted"):
        rig.run()
    assert rig.device.calls.count("copy_out 1 on store") == 2
    assert rig.values()[1] == rig.original[1].translate(recording.NEXT)


@KINDS
@pytest.mark.parametrize("batch", range(len(SIZES)))
def test_says_which_batch_is_lost_when_a_store_fails_twice(
    recording: ModuleType, kind: str, batch: int
) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.device.fails = lambda number, call: call == f"copy_out {batch} on store"
    with pytest.raises(StateLostError) as caught:
        rig.run()
    message = str(caught.value)
    assert message.startswith(f"Batches [{batch}] of {len(SIZES)} could not be stored to the host")
    assert "Go on from a checkpoint" in message
    assert repr(rig.device.error) in message
    assert caught.value.__cause__ is rig.device.error

    # The lost batch has its old values, as the message says; the ones before it have their new.
    new = [old.translate(recording.NEXT) for old in rig.original]
    assert rig.values() == [*new[:batch], *rig.original[batch:]]
    assert rig.residencies() == {Residency.HOST}
    assert rig.device.held == []
    assert (rig.ledger.device_bytes, rig.ledger.updates) == (0, 0)


@KINDS
def test_works_after_a_lost_batch(recording: ModuleType, kind: str) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.device.fails = lambda number, call: call == "copy_out 1 on store"
    with pytest.raises(StateLostError):
        rig.run()
    rig.device.fails = lambda number, call: False
    before = rig.values()
    rig.run()
    rig.device.drain()
    assert rig.values() == [old.translate(recording.NEXT) for old in before]
    assert rig.device.violations == []


@pytest.mark.parametrize("verb", ["record", "wait", "synchronize"])
@KINDS
def test_holds_nothing_and_goes_on_when_the_way_back_fails_too(
    recording: ModuleType, kind: str, verb: str
) -> None:
    # A broken device, or an error that shows late, fails every verb from some moment on.
    rig = recording.Rig(kind, SIZES)
    rig.device.fails = lambda number, call: (
        call == "update 2" or ("update 2" in rig.device.calls and call.startswith(verb))
    )
    with pytest.raises(RuntimeError):
        rig.run()
    assert rig.residencies() == {Residency.HOST}
    assert rig.device.held == []
    assert rig.ledger.device_bytes == 0

    rig.device.fails = lambda number, call: False
    rig.run()
    assert rig.ledger.updates == 1


@KINDS
@pytest.mark.parametrize("interrupts", [1, 3])
@pytest.mark.parametrize("after_the_work", [False, True], ids=["before", "after"])
def test_loses_and_holds_nothing_when_the_way_back_is_interrupted(
    recording: ModuleType, kind: str, interrupts: int, after_the_work: bool
) -> None:
    def rig_with_error(first: int, extra: range) -> Any:
        rig = recording.Rig(kind, SIZES)
        rig.device.error = KeyboardInterrupt("planted")
        rig.device.fails = lambda number, call: number == first or number in extra
        rig.device.fails_after_the_work = after_the_work
        with pytest.raises(KeyboardInterrupt):
            rig.run()
        return rig

    for first in places(recording, kind, "update"):
        undisturbed = len(rig_with_error(first, range(0)).device.calls)
        for start in range(first + 1, undisturbed):
            rig = rig_with_error(first, range(start, start + interrupts))
            assert rig.values() == rig.expected()
            assert rig.residencies() == {Residency.HOST}
            assert rig.device.held == []
            assert rig.ledger.device_bytes == 0


OUT_OF_MEMORY = {
    ("packed", "arena 1"): "staging arena 1 (batches 1, 3, …) (90 bytes)",
    ("per tensor", "batch 3"): "batch 3 of 5 (80 bytes)",
}


@pytest.mark.parametrize(("kind", "memory"), OUT_OF_MEMORY)
def test_explains_a_full_device_and_keeps_the_type_of_the_error(
    recording: ModuleType, kind: str, memory: str
) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.device.error = MemoryError("limit 100, held 90")
    rig.device.fails = lambda number, call: call == f"restore {memory}"
    with pytest.raises(MemoryError) as caught:
        rig.run()
    message = str(caught.value)
    assert message.startswith(
        f"Out of device memory while restoring {OUT_OF_MEMORY[kind, memory]} of optimizer states."
    )
    assert "Nothing is lost" in message
    assert "Raise swap_times for smaller batches" in message
    assert "(The device said: limit 100, held 90)" in message
    assert caught.value.__cause__ is rig.device.error
    assert rig.values() == rig.expected()


def test_writes_large_sizes_with_separators(recording: ModuleType) -> None:
    rig = recording.Rig("per tensor", [1_234_567])
    rig.device.error = MemoryError("full")
    rig.device.fails = lambda number, call: call.startswith("restore")
    with pytest.raises(MemoryError, match=r"batch 0 of 1 \(1,234,567 bytes\)"):
        rig.run()


def test_explains_nothing_about_an_error_that_is_not_out_of_memory(recording: ModuleType) -> None:
    device = recording.Recorder()
    device.fails = lambda number, call: True
    with pytest.raises(RuntimeError) as caught:
        restore_or_explain(device, recording.Memory("arena", 8), "an arena")
    assert caught.value is device.error
    assert str(caught.value) == "planted"
