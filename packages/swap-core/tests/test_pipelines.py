# SPDX-License-Identifier: Apache-2.0
"""Both pipelines: the verbs they use, in which order, and what is held and counted."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import Residency, SwapInternalError

KINDS = pytest.mark.parametrize("kind", ["packed", "per tensor"])
COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 5])
SIZES = [40, 90, 30, 80, 50]


def load(i: int) -> list[str]:
    return [f"copy_in {i} on load", f"record loaded {i} on load"]


def update(i: int) -> list[str]:
    return [f"update {i}", f"record updated {i} on compute"]


def store(i: int) -> list[str]:
    return [
        f"wait on store for updated {i}",
        f"copy_out {i} on store",
        f"record stored {i} on store",
    ]


def fetch(i: int) -> list[str]:
    """Per tensor: take the memory of batch ``i`` and load into it."""
    return [
        f"restore batch {i}",
        f"record restored {i} on compute",
        f"wait on load for restored {i}",
        *load(i),
    ]


def retire(i: int) -> list[str]:
    """Per tensor: give the memory of batch ``i`` back."""
    return [f"wait on compute for stored {i}", f"release batch {i}"]


def loaded(i: int) -> str:
    return f"wait on compute for loaded {i}"


def reuse(i: int) -> str:
    """Packed: the arena of batch ``i`` may be loaded into again."""
    return f"wait on load for stored {i}"


TAKE_TWO = [
    "restore arena 0",
    "restore arena 1",
    "record restored 0 on compute",
    "wait on load for restored 0",
]
TAKE_THREE = [*TAKE_TWO[:2], "restore arena 2", *TAKE_TWO[2:]]
GIVE_TWO = ["release arena 1", "release arena 0"]


def turn(i: int) -> list[str]:
    return [loaded(i), *update(i), *store(i)]


def end(i: int) -> str:
    return f"wait on compute for stored {i}"


MEANWHILE = ("meanwhile", "record meanwhile done on compute")
TWO_ARENAS = {
    1: [*TAKE_TWO, *load(0), *MEANWHILE, *turn(0), end(0), *GIVE_TWO],
    2: [*TAKE_TWO, *load(0), *load(1), *MEANWHILE, *turn(0), *turn(1), end(1), *GIVE_TWO],
    3: [
        *[*TAKE_TWO, *load(0), *load(1), *MEANWHILE],
        *[*turn(0), reuse(0), *load(2)],
        *[*turn(1), *turn(2), end(2), *GIVE_TWO],
    ],
    5: [
        *[*TAKE_TWO, *load(0), *load(1), *MEANWHILE],
        *[*turn(0), reuse(0), *load(2)],
        *[*turn(1), reuse(1), *load(3)],
        *[*turn(2), reuse(2), *load(4)],
        *[*turn(3), *turn(4), end(4), *GIVE_TWO],
    ],
}

THREE_ARENAS = {
    2: [
        *[*TAKE_THREE, *load(0), *load(1), *MEANWHILE],
        *[*turn(0), *turn(1), end(1), "release arena 2", *GIVE_TWO],
    ],
    5: [
        *[*TAKE_THREE, *load(0), *load(1), *load(2), *MEANWHILE],
        *[*turn(0), reuse(0), *load(3)],
        *[*turn(1), reuse(1), *load(4)],
        *[*turn(2), *turn(3), *turn(4), end(4), "release arena 2", *GIVE_TWO],
    ],
}

PER_TENSOR = {
    1: [*fetch(0), *MEANWHILE, loaded(0), *update(0), *store(0), *retire(0)],
    2: [
        *[*fetch(0), *MEANWHILE],
        *[loaded(0), *fetch(1), *update(0), *store(0)],
        *[loaded(1), *retire(0), *update(1), *store(1), *retire(1)],
    ],
    3: [
        *[*fetch(0), *MEANWHILE],
        *[loaded(0), *fetch(1), *update(0), *store(0)],
        *[loaded(1), *retire(0), *fetch(2), *update(1), *store(1)],
        *[loaded(2), *retire(1), *update(2), *store(2), *retire(2)],
    ],
    5: [
        *[*fetch(0), *MEANWHILE],
        *[loaded(0), *fetch(1), *update(0), *store(0)],
        *[loaded(1), *retire(0), *fetch(2), *update(1), *store(1)],
        *[loaded(2), *retire(1), *fetch(3), *update(2), *store(2)],
        *[loaded(3), *retire(2), *fetch(4), *update(3), *store(3)],
        *[loaded(4), *retire(3), *update(4), *store(4), *retire(4)],
    ],
}


@pytest.mark.parametrize("count", TWO_ARENAS)
def test_calls_these_verbs_with_two_arenas(recording: ModuleType, count: int) -> None:
    rig = recording.Rig("packed", SIZES[:count])
    rig.run()
    assert rig.device.calls == TWO_ARENAS[count]


@pytest.mark.parametrize("count", THREE_ARENAS)
def test_calls_these_verbs_with_three_arenas(recording: ModuleType, count: int) -> None:
    rig = recording.Rig("packed", SIZES[:count], arenas=3)
    rig.run()
    assert rig.device.calls == THREE_ARENAS[count]


@pytest.mark.parametrize("count", PER_TENSOR)
def test_calls_these_verbs_per_tensor(recording: ModuleType, count: int) -> None:
    rig = recording.Rig("per tensor", SIZES[:count])
    rig.run()
    assert rig.device.calls == PER_TENSOR[count]


@KINDS
@COUNTS
def test_queues_the_next_load_before_each_update(
    recording: ModuleType, kind: str, count: int
) -> None:
    rig = recording.Rig(kind, SIZES[:count])
    rig.run()
    for i in range(count - 1):
        calls = rig.device.calls
        assert calls.index(f"copy_in {i + 1} on load") < calls.index(f"update {i}")


@KINDS
@COUNTS
def test_runs_meanwhile_once_between_the_first_loads_and_the_first_update(
    recording: ModuleType, kind: str, count: int
) -> None:
    rig = recording.Rig(kind, SIZES[:count])
    rig.run()
    calls = rig.device.calls
    assert calls.count("meanwhile") == 1
    assert calls.index("record loaded 0 on load") < calls.index("meanwhile")
    assert calls.index("meanwhile") < calls.index(loaded(0)) < calls.index("update 0")


@KINDS
@COUNTS
def test_holds_nothing_afterwards(recording: ModuleType, kind: str, count: int) -> None:
    rig = recording.Rig(kind, SIZES[:count])
    rig.run()
    assert rig.residencies() == {Residency.HOST}
    assert rig.device.held == []
    assert rig.ledger.device_bytes == 0


@KINDS
@given(st.lists(st.integers(2, 100), min_size=1, max_size=12), st.integers(2, 4))
@settings(deadline=None)
def test_holds_at_most_the_arenas_or_two_adjacent_batches(
    recording: ModuleType, kind: str, sizes: list[int], arenas: int
) -> None:
    rig = recording.Rig(kind, sizes, arenas=arenas)
    rig.run()
    formula = {
        "packed": sum(max(sizes[i::arenas], default=0) for i in range(arenas)),
        "per tensor": max(a + b for a, b in pairwise([0, *sizes])),
    }
    assert rig.ledger.peak_device_bytes == formula[kind]


@KINDS
@given(st.lists(st.integers(2, 100), min_size=1, max_size=12), st.integers(1, 3))
@settings(deadline=None)
def test_counts_copies_and_bytes(
    recording: ModuleType, kind: str, sizes: list[int], runs: int
) -> None:
    rig = recording.Rig(kind, sizes)
    for _ in range(runs):
        rig.run()
    ledger = rig.ledger
    assert ledger.updates == runs
    # Each batch of the rig has two transfers.
    assert ledger.copies_in == ledger.copies_out == 2 * len(sizes) * runs
    assert ledger.bytes_loaded == ledger.bytes_stored == sum(sizes) * runs
    assert ledger.restores == {"packed": 2, "per tensor": len(sizes)}[kind] * runs


@KINDS
def test_refuses_a_batch_that_is_not_on_the_host(recording: ModuleType, kind: str) -> None:
    rig = recording.Rig(kind, SIZES)
    rig.batches[1].to_loading()
    with pytest.raises(SwapInternalError, match="batch 1 is LOADING, expected HOST"):
        rig.run()
