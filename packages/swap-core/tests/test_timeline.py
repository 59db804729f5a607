# SPDX-License-Identifier: Apache-2.0
"""``step_times`` reconstructs starts from ends; here the true starts are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import BatchTimes, StepTimes, VirtualDevice, VirtualStream, step_times

Run: TypeAlias = Callable[..., Any]

KINDS = pytest.mark.parametrize("kind", ["packed", "per tensor"])


class Probe:
    """A virtual device that notes when each copy starts."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.starts: dict[str, list[float]] = {"load": [], "update": [], "store": []}

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.device, verb)

    def copy_in(self, stream: VirtualStream, transfers: Sequence[int]) -> None:
        self.starts["load"].append(stream.free_at)
        self.device.copy_in(stream, transfers)

    def copy_out(self, stream: VirtualStream, transfers: Sequence[int]) -> None:
        self.starts["store"].append(stream.free_at)
        self.device.copy_out(stream, transfers)

    def compute(self, seconds: float) -> None:
        self.starts["update"].append(self.device.compute_stream().free_at)
        self.device.compute(seconds)


def times_of(batches: Sequence[Any], meanwhile: float, kind: str, arenas: int = 2) -> StepTimes:
    start = batches[0].restored.at
    return step_times(
        [batch.loaded.at - start for batch in batches],
        [batch.updated.at - start for batch in batches],
        [batch.stored.at - start for batch in batches],
        ring=arenas if kind == "packed" else 2,
        update_after_store=kind == "per tensor",
        meanwhile=meanwhile - start,
    )


@KINDS
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    seconds=st.lists(st.integers(0, 60), min_size=10, max_size=10),
    arenas=st.integers(2, 4),
    backward=st.integers(0, 100),
    other=st.integers(0, 80),
)
@settings(deadline=None)
def test_finds_the_true_start_of_everything(
    run_virtual: Run,
    kind: str,
    sizes: list[int],
    seconds: list[int],
    arenas: int,
    backward: int,
    other: int,
) -> None:
    # Whole numbers of seconds: loads take 1 per byte and stores 2, so floating point is exact.
    device = Probe(VirtualDevice(1.0, 0.5))
    device.device.compute(backward)
    batches, meanwhile = run_virtual(
        device,
        kind,
        sizes,
        arenas=arenas,
        update=lambda i: device.compute(seconds[i]),
        meanwhile=lambda: device.device.compute(other),
    )
    times = times_of(batches, meanwhile, kind, arenas)
    found = {
        "load": [batch.load_start + backward for batch in times.batches],
        "update": [batch.update_start + backward for batch in times.batches],
        "store": [batch.store_start + backward for batch in times.batches],
    }
    assert found == device.starts
    assert times.load == sum(sizes)
    assert times.update == sum(seconds[: len(sizes)])
    assert times.store == 2 * sum(sizes)
    assert times.total == device.now - backward
    assert times.meanwhile == other
    assert times.wait == times.total - times.update - other


def test_agrees_with_the_formula_of_a_compute_bound_packed_step(run_virtual: Run) -> None:
    n, load, compute, store = 6, 2, 9, 3
    device = VirtualDevice(1 / load, 1 / store)
    batches, meanwhile = run_virtual(
        device, "packed", [1] * n, update=lambda index: device.compute(compute)
    )
    times = times_of(batches, meanwhile, "packed")
    # Updates follow each other without a gap; an arena is free again when its store ends.
    updates = [load + i * compute for i in range(n)]
    loads = [0, load, *(updates[i] + compute + store for i in range(n - 2))]
    assert times.batches == tuple(
        BatchTimes(
            load_start=start,
            load_end=start + load,
            update_start=update,
            update_end=update + compute,
            store_start=update + compute,
            store_end=update + compute + store,
        )
        for start, update in zip(loads, updates, strict=True)
    )
    assert (times.total, times.wait) == (load + n * compute + store, load + store)


def test_agrees_with_the_formula_of_a_load_bound_step_per_tensor(run_virtual: Run) -> None:
    n, load, compute, store = 6, 9, 2, 3
    device = VirtualDevice(1 / load, 1 / store)
    batches, meanwhile = run_virtual(
        device, "per tensor", [1] * n, update=lambda index: device.compute(compute)
    )
    times = times_of(batches, meanwhile, "per tensor")
    assert times.batches == tuple(
        BatchTimes(
            load_start=end - load,
            load_end=end,
            update_start=end,
            update_end=end + compute,
            store_start=end + compute,
            store_end=end + compute + store,
        )
        for end in (load * (i + 1) for i in range(n))
    )
    total = n * load + compute + store
    assert (times.total, times.wait) == (total, total - n * compute)


@KINDS
def test_counts_other_work_during_the_first_load_as_no_wait(run_virtual: Run, kind: str) -> None:
    device = VirtualDevice(1, 1)
    batches, meanwhile = run_virtual(device, kind, [10], meanwhile=lambda: device.compute(7))
    # 10 s of load, 7 of them filled with work, and 10 s of store.
    assert times_of(batches, meanwhile, kind).wait == 10 - 7 + 10


def test_is_all_zero_without_batches() -> None:
    assert step_times([], [], [], ring=2, update_after_store=False) == StepTimes(
        total=0, load=0, update=0, meanwhile=0, store=0, wait=0, batches=()
    )


@pytest.mark.parametrize("update_after_store", [True, False])
@pytest.mark.parametrize("tail_left", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@given(
    ends=st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=8),
    called=st.integers(0, 120),
    other=st.integers(0, 30),
)
@settings(deadline=None)
def test_no_time_of_an_update_that_began_before_its_call_is_negative(
    ends: list[tuple[int, int, int]],
    called: int,
    other: int,
    update_after_store: bool,
    tail_left: bool,
    kept: bool,
) -> None:
    """What was done before the call took no time of it."""
    loaded, updated, stored = ([] for _ in range(3))
    load_end = update_end = store_end = 0
    for load, update, store in ends:
        load_end += load
        update_end = max(update_end, load_end) + update
        if update_end > called:  # it was not updated before the call
            update_end = max(update_end, called + other + update)
        store_end = max(store_end, update_end) + store
        loaded.append(float(max(0, load_end - called)))
        updated.append(float(max(0, update_end - called)))
        stored.append(float(max(0, store_end - called)))
    if kept:
        stored[-1] = updated[-1]
    times = step_times(
        loaded,
        updated,
        stored,
        ring=len(ends) + 1,
        update_after_store=update_after_store,
        meanwhile=float(other),
        tail_left=tail_left,
    )
    parts = (times.load, times.update, times.meanwhile, times.store, times.wait)
    assert all(0 <= part <= times.total for part in parts)
    assert times.total == max(other, *updated, *stored)
    for batch in times.batches:
        assert 0 <= batch.load_start <= batch.load_end
        assert 0 <= batch.update_start <= batch.update_end
        assert 0 <= batch.store_start <= batch.store_end
