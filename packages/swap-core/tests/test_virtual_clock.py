# SPDX-License-Identifier: Apache-2.0
"""The pipelines on a clock made of arithmetic: exact times of uniform batches, by formula.

``n`` batches take ``L`` seconds to load, ``C`` to update and ``S`` to store, all whole numbers, so
that floating point is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, TypeAlias

import pytest

from swap_core import VirtualDevice, VirtualMemory

Run: TypeAlias = Callable[..., Any]

KINDS = pytest.mark.parametrize("kind", ["packed", "per tensor"])
NBYTES = 2**20
COUNTS = (1, 2, 3, 4, 5, 16)

BALANCES = {
    "compute-bound": (2, 9, 3),
    "load-bound": (9, 2, 3),
    "store-bound": (2, 3, 9),
    "balanced": (4, 4, 4),
    "without compute": (4, 0, 4),
    "just compute-bound": (3, 7, 4),
}


def device_with(load: int, store: int, **options: Any) -> VirtualDevice:
    return VirtualDevice(NBYTES / load, NBYTES / store, **options)


def makespan(run: Run, device: VirtualDevice, kind: str, n: int, c: int, arenas: int = 2) -> float:
    run(device, kind, [NBYTES] * n, arenas=arenas, update=lambda index: device.compute(c))
    return device.now


def packed_formula(n: int, load: int, compute: int, store: int, arenas: int) -> int:
    """The longest chain: along the slowest stream, but through a whole batch at each reuse.

    A chain that goes through ``k`` reuses of an arena passes ``k + 1`` whole batches, and each
    reuse skips ``arenas`` batches; the rest it goes along one stream.
    """
    whole, slowest = load + compute + store, max(load, compute, store)
    reuses = (n - 1) // arenas
    return max((k + 1) * whole + (n - 1 - k * arenas) * slowest for k in (0, reuses))


def per_tensor_formula(n: int, load: int, compute: int, store: int) -> int:
    """A turn: load the next batch, and meanwhile update and store this one."""
    return load + (n - 1) * max(load, compute + store) + compute + store


@pytest.mark.parametrize(("load", "compute", "store"), BALANCES.values(), ids=BALANCES)
@pytest.mark.parametrize("arenas", [2, 3, 4])
def test_takes_the_time_of_the_longest_chain_when_packed(
    run_virtual: Run, load: int, compute: int, store: int, arenas: int
) -> None:
    for n in COUNTS:
        seconds = makespan(run_virtual, device_with(load, store), "packed", n, compute, arenas)
        assert seconds == packed_formula(n, load, compute, store, arenas)


@pytest.mark.parametrize(("load", "compute", "store"), BALANCES.values(), ids=BALANCES)
def test_takes_the_time_of_all_turns_per_tensor(
    run_virtual: Run, load: int, compute: int, store: int
) -> None:
    for n in COUNTS:
        seconds = makespan(run_virtual, device_with(load, store), "per tensor", n, compute)
        assert seconds == per_tensor_formula(n, load, compute, store)


@pytest.mark.parametrize("n", COUNTS)
def test_hides_all_but_one_load_and_one_store_when_packed_and_compute_bound(
    run_virtual: Run, n: int
) -> None:
    assert makespan(run_virtual, device_with(2, 3), "packed", n, 9) == 2 + n * 9 + 3


@pytest.mark.parametrize("n", COUNTS)
def test_hides_all_but_one_update_and_one_store_when_load_bound(run_virtual: Run, n: int) -> None:
    for kind in ("packed", "per tensor"):
        assert makespan(run_virtual, device_with(9, 3), kind, n, 2) == n * 9 + 2 + 3


@KINDS
@pytest.mark.parametrize("n", [2, 3, 4, 5, 16])
def test_takes_the_sum_of_loads_and_stores_on_a_half_duplex_link(
    run_virtual: Run, kind: str, n: int
) -> None:
    load, compute, store = 4, 3, 5
    seconds = makespan(run_virtual, device_with(load, store, duplex=False), kind, n, compute)
    # The link never rests, except during the last update, which packed hides behind a store.
    rest = {"packed": 0, "per tensor": compute}[kind]
    assert seconds == n * (load + store) + rest


@KINDS
@pytest.mark.parametrize(("load", "compute", "store"), [(4, 1, 4), (4, 0, 4), (9, 2, 3)])
def test_is_faster_on_a_duplex_link(
    run_virtual: Run, kind: str, load: int, compute: int, store: int
) -> None:
    seconds = {
        duplex: makespan(run_virtual, device_with(load, store, duplex=duplex), kind, 16, compute)
        for duplex in (True, False)
    }
    assert seconds[True] < seconds[False]


@pytest.mark.parametrize("kind", ["packed", "per tensor"])
def test_meets_the_target_for_a_full_duplex_link(run_virtual: Run, kind: str) -> None:
    for load, store in product((1, 2, 4, 7), repeat=2):
        seconds = makespan(run_virtual, device_with(load, store), kind, 16, 0)
        assert seconds <= 1.05 * 16 * max(load, store) + load + store


@KINDS
def test_adds_the_latency_of_every_copy(run_virtual: Run, kind: str) -> None:
    device = device_with(4, 4, latency=2)
    assert makespan(run_virtual, device, kind, 5, 0) == (5 + 1) * (4 + 2)


@KINDS
def test_begins_the_next_update_after_the_last_store(run_virtual: Run, kind: str) -> None:
    device = device_with(4, 4)
    once = makespan(run_virtual, device, kind, 5, 3)
    assert makespan(run_virtual, device, kind, 5, 3) == 2 * once


@KINDS
def test_overlaps_other_work_with_the_first_load(run_virtual: Run, kind: str) -> None:
    device = device_with(4, 4)
    run_virtual(device, kind, [NBYTES], meanwhile=lambda: device.compute(3))
    assert device.now == max(4, 3) + 4


@KINDS
def test_peaks_at_the_arenas_or_two_adjacent_batches(run_virtual: Run, kind: str) -> None:
    sizes = [40, 90, 60, 30, 50]
    device = VirtualDevice(1, 1)
    run_virtual(device, kind, sizes)
    formula = {
        "packed": max(sizes[0::2]) + max(sizes[1::2]),
        "per tensor": max(a + b for a, b in pairwise(sizes)),
    }
    assert (device.peak_bytes, device.held_bytes) == (formula[kind], 0)


@KINDS
def test_runs_in_exactly_its_peak_and_not_in_one_byte_less(run_virtual: Run, kind: str) -> None:
    sizes = [40, 90, 30, 80, 50]
    unlimited = VirtualDevice(1, 1)
    run_virtual(unlimited, kind, sizes)
    peak = unlimited.peak_bytes
    run_virtual(VirtualDevice(1, 1, capacity=peak), kind, sizes)
    short = VirtualDevice(1, 1, capacity=peak - 1)
    with pytest.raises(MemoryError, match="Raise swap_times"):
        run_virtual(short, kind, sizes)
    assert short.held_bytes == 0


def test_restores_and_releases_twice_as_once() -> None:
    device, memory = VirtualDevice(1, 1), VirtualMemory(1_000)
    for verb, held in ((device.restore, 1_000), (device.release, 0)):
        verb(memory)
        verb(memory)
        assert (device.held_bytes, memory.held) == (held, bool(held))


def test_says_what_does_not_fit() -> None:
    device = VirtualDevice(1, 1, capacity=5_000)
    device.restore(VirtualMemory(4_000))
    with pytest.raises(device.out_of_memory, match="2,000 bytes over 4,000 held"):
        device.restore(VirtualMemory(2_000))


def test_is_done_when_its_last_stream_is() -> None:
    device = VirtualDevice(1, 1)
    device.compute(2)
    assert device.now == 2
    device.copy_in(device.load_stream, [3, 4])
    assert device.now == 3 + 4
    device.copy_out(device.store_stream, [9])
    assert device.now == 9


def test_measures_between_events() -> None:
    device = VirtualDevice(1, 1)
    start, end = device.create_event(), device.create_event()
    device.compute(2)
    device.record(start, device.compute_stream())
    device.compute(5)
    device.record(end, device.compute_stream())
    device.synchronize(end)
    assert device.elapsed(start, end) == 5
