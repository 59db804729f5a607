# SPDX-License-Identifier: Apache-2.0
"""Forecasts: exact where a formula is known, and never far from the floor."""

from __future__ import annotations

from typing import Any

import pytest

from swap_core import (
    ALIGNMENT,
    PRESETS,
    Forecast,
    Hardware,
    Workload,
    align,
    forecast,
    partition,
    recommended,
)

MIB = 2**20


def hardware(**options: Any) -> Hardware:
    """A load takes 4 s per MiB, a store 2 s, an update 1 s."""
    rates = {"load_bytes_per_second": MIB / 4, "store_bytes_per_second": MIB / 2}
    free = {"copy_seconds": 0.0, "launch_seconds": 0.0}
    return Hardware(**{**rates, "memory_bytes_per_second": float(MIB), **free, **options})


def workload(*sizes: int) -> Workload:
    return Workload(sizes, touched_bytes=1.0)


def test_even_parameters_take_the_load_and_one_update_and_store() -> None:
    told = forecast(workload(*[MIB] * 8), hardware(), 4)
    # Bound by loads of 8 s: the last batch is updated (2 s) and stored (4 s) after the last.
    assert told.update_seconds == 4 * 8 + 2 + 4
    assert told.floor_seconds == 4 * 8
    assert told.native_seconds == 8
    assert told.added_seconds == told.update_seconds - 8
    assert told.saved_bytes == told.state_bytes == 8 * MIB
    assert told.peak_bytes == 2 * 2 * MIB
    assert told.batches == told.swap_times == 4


def test_one_direction_at_a_time_adds_up() -> None:
    both = forecast(workload(*[MIB] * 8), hardware(), 4)
    one = forecast(workload(*[MIB] * 8), hardware(duplex=False), 4)
    assert one.floor_seconds == 8 * (4 + 2)
    assert one.update_seconds >= one.floor_seconds > both.update_seconds


def test_each_copy_and_each_update_has_its_own_cost() -> None:
    plain = forecast(workload(*[MIB] * 8), hardware(), 4)
    slow = forecast(workload(*[MIB] * 8), hardware(copy_seconds=0.5, launch_seconds=0.25), 4)
    assert slow.update_seconds == plain.update_seconds + 4 * 0.5 + 0.25 + 0.5
    assert slow.native_seconds == plain.native_seconds + 0.25


def test_a_batch_has_at_least_one_parameter_and_takes_whole_regions() -> None:
    told = forecast(workload(1, 1, 1), hardware(), 16)
    assert told.batches == 3
    assert told.swap_times == 16
    assert told.peak_bytes == 2 * ALIGNMENT


def test_more_arenas_are_counted() -> None:
    assert forecast(workload(*[MIB] * 8), hardware(), 8, staging_buffers=3).peak_bytes == 3 * MIB


SKEWED = {
    "even": lambda n: [MIB] * n,
    "one large": lambda n: [MIB * n, *[MIB] * (n - 1)],
    "harmonic": lambda n: [max(1, 64 * MIB // (i + 1)) for i in range(n)],
    "sawtooth": lambda n: [MIB * (1 + i % 7) for i in range(n)],
}


COUNTS = [1, 2, 3, 10, 30, 63, 65, 70, 100, 127, 130, 1000, 10_000]
LINKS = [(25e9, 25e9), (50e9, 20e9)]


def exceeds_the_floor_by(sizes: list[int], swap_times: int, rates: tuple[float, float]) -> float:
    """How many times the floor an update takes, besides the largest batch in, updated, and out."""
    load, store = rates
    link = Hardware(load, store, 2e12, copy_seconds=0.0, launch_seconds=0.0)
    told = forecast(Workload(tuple(sizes), touched_bytes=4.0), link, swap_times)
    parts = partition(sizes, swap_times)
    largest = max(sum(align(sizes[i]) for i in part) for part in parts)
    in_and_out = largest / load + largest / store + 4.0 * largest / 2e12
    assert told.floor_seconds <= told.update_seconds
    return (told.update_seconds - in_and_out) / told.floor_seconds


@pytest.mark.parametrize("rates", LINKS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("swap_times", [1, 4, 16, 64])
@pytest.mark.parametrize("skew", SKEWED)
def test_a_step_is_near_the_floor_plus_one_batch_in_and_one_out(
    skew: str, count: int, swap_times: int, rates: tuple[float, float]
) -> None:
    sizes = SKEWED[skew](count)
    assert exceeds_the_floor_by(sizes, swap_times, rates) <= 1.05


def test_the_least_memory_of_those_that_are_nearly_the_fastest_is_recommended() -> None:
    def told(swap_times: int, seconds: float, peak: int) -> Forecast:
        return Forecast(swap_times, swap_times, 100, peak, 1.0, seconds, 1.0)

    forecasts = [told(4, 10.0, 50), told(16, 10.4, 12), told(64, 10.6, 3)]
    assert recommended(forecasts).swap_times == 16


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_their_source(name: str) -> None:
    assert "https://" in PRESETS[name].source
    assert forecast(workload(MIB), PRESETS[name].hardware, 4).update_seconds > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_bytes_per_second", 0.0),
        ("store_bytes_per_second", -1.0),
        ("memory_bytes_per_second", float("nan")),
        ("copy_seconds", -1e-9),
        ("launch_seconds", float("nan")),
    ],
)
def test_impossible_hardware_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Hardware: {field}={value!r} is not accepted; give a"):
        hardware(**{field: value})


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        forecast(workload(), hardware(), 4)
