# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import partition, update_order

SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=40)
FEW_SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=9)
BATCHES = st.integers(1, 50)


@st.composite
def sizes_and_joined(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    sizes = draw(FEW_SIZES)
    return sizes, draw(st.sets(st.integers(0, len(sizes) - 1)))


def skewed_cases() -> list[tuple[list[int], int]]:
    """Sizes as different as random ones are, where even shares are seldom the best cuts."""
    rng = random.Random(0)
    return [
        ([rng.randint(1, 30) for _ in range(rng.randint(4, 9))], rng.randint(2, 6))
        for _ in range(500)
    ]


def loads(sizes: list[int], parts: tuple[range, ...]) -> list[int]:
    return [sum(sizes[i] for i in part) for part in parts]


def all_partitions(sizes: list[int], count: int, joined: set[int]) -> list[tuple[range, ...]]:
    """Oracle: every way to cut, by trying all sets of cuts."""
    places = [i for i in range(1, len(sizes)) if i not in joined]
    return [
        tuple(range(a, b) for a, b in pairwise((0, *cuts, len(sizes))))
        for cuts in combinations(places, count - 1)
    ]


@given(SIZES, BATCHES)
@settings(deadline=None)
def test_covers_all_units_in_order_with_ranges_that_are_not_empty(
    sizes: list[int], batches: int
) -> None:
    parts = partition(sizes, batches)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert all(parts)


@given(SIZES, BATCHES)
@settings(deadline=None)
def test_makes_as_many_batches_as_asked_for_or_as_there_are_units(
    sizes: list[int], batches: int
) -> None:
    assert len(partition(sizes, batches)) == min(batches, len(sizes))


@given(SIZES, BATCHES)
@settings(deadline=None)
def test_has_a_largest_batch_of_at_most_the_average_plus_the_largest_unit(
    sizes: list[int], batches: int
) -> None:
    parts = partition(sizes, batches)
    # Multiplied by the number of batches, so that everything is an integer.
    assert max(loads(sizes, parts)) * len(parts) <= sum(sizes) + max(sizes) * len(parts)


@given(sizes_and_joined(), st.integers(1, 10))
@settings(deadline=None)
def test_has_the_smallest_largest_batch_that_any_cut_has(
    case: tuple[list[int], set[int]], batches: int
) -> None:
    sizes, joined = case
    parts = partition(sizes, batches, joined=joined)
    oracle = min(max(loads(sizes, cut)) for cut in all_partitions(sizes, len(parts), joined))
    assert max(loads(sizes, parts)) == oracle


def test_has_the_smallest_largest_batch_of_skewed_units() -> None:
    for sizes, batches in skewed_cases():
        parts = partition(sizes, batches)
        oracle = min(max(loads(sizes, cut)) for cut in all_partitions(sizes, len(parts), set()))
        assert max(loads(sizes, parts)) == oracle


def is_nearest_to_even(
    sizes: list[int], parts: tuple[range, ...], optimal: list[tuple[range, ...]]
) -> bool:
    """Oracle: given the cuts before it, no optimal partition has a nearer j-th cut."""
    total, count = sum(sizes), len(parts)

    def distance(cut: tuple[range, ...], j: int) -> int:
        return abs(sum(sizes[: cut[j].start]) * count - total * j)

    return all(
        distance(parts, j)
        == min(distance(cut, j) for cut in optimal if cut[: j - 1] == parts[: j - 1])
        for j in range(1, count)
    )


def test_cuts_as_near_to_even_shares_as_the_largest_batch_allows() -> None:
    for sizes, batches in skewed_cases():
        parts = partition(sizes, batches)
        largest = max(loads(sizes, parts))
        every = all_partitions(sizes, len(parts), set())
        optimal = [cut for cut in every if max(loads(sizes, cut)) <= largest]
        assert is_nearest_to_even(sizes, parts, optimal)


def exchange(sizes: list[int]) -> int:
    """For each pair of neighbours the larger one."""
    return sum(max(pair) for pair in pairwise(sizes))


@given(SIZES)
@settings(deadline=None)
def test_updates_every_batch_once_in_parameter_order_or_the_largest_first(sizes: list[int]) -> None:
    order = update_order(sizes)
    assert sorted(order) == list(range(len(sizes)))
    if exchange(sizes) <= 1.01 * sum(sizes):
        assert order == tuple(range(len(sizes)))
    else:
        # Those of one size stay in parameter order.
        assert order == tuple(sorted(order, key=lambda position: (-sizes[position], position)))


@given(SIZES)
@settings(deadline=None)
def test_neighbours_of_one_size_share_the_link(sizes: list[int]) -> None:
    ordered = [sizes[position] for position in update_order(sizes)]
    assert exchange(ordered) <= max(exchange(sizes), sum(sizes))
    assert exchange(ordered) <= 1.01 * sum(sizes)


def test_no_batches_have_no_order() -> None:
    assert update_order([]) == ()


@given(sizes_and_joined(), BATCHES)
@settings(deadline=None)
def test_keeps_joined_units_with_the_unit_before_them(
    case: tuple[list[int], set[int]], batches: int
) -> None:
    sizes, joined = case
    parts = partition(sizes, batches, joined=joined)
    may_start = [i for i in range(len(sizes)) if i == 0 or i not in joined]
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert len(parts) == min(batches, len(may_start))
    assert {part.start for part in parts} <= set(may_start)


def test_accepts_a_joined_unit_without_bytes_of_its_own() -> None:
    # A parameter that is listed twice: the second listing moves nothing more.
    assert partition([4, 0, 4, 4], 3, joined={1}) == (range(2), range(2, 3), range(3, 4))


def test_makes_one_batch_when_one_is_asked_for() -> None:
    assert partition([3, 1, 2], 1) == (range(3),)


@pytest.mark.parametrize("times", [1, 10])
def test_makes_one_batch_per_unit_when_that_many_or_more_are_asked_for(times: int) -> None:
    sizes = [5, 1, 4, 1, 5]
    assert partition(sizes, times * len(sizes)) == tuple(range(i, i + 1) for i in range(5))


@pytest.mark.parametrize("batches", [1, 16])
def test_makes_no_batch_of_no_units(batches: int) -> None:
    assert partition([], batches) == ()


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 10**9))
@settings(deadline=None)
def test_gives_equal_units_to_batches_that_differ_by_one_at_most(
    count: int, batches: int, size: int
) -> None:
    lengths = [len(part) for part in partition([size] * count, batches)]
    assert max(lengths) - min(lengths) <= 1


def test_cuts_equal_layers_exactly_between_layers() -> None:
    # The RFC's workload: 816 tensors in 48 layers, 25,239,552 parameters, two fp32 states each.
    layer = [*[65_536, 64] * 8, 1_024]
    numels = layer * 48
    assert (len(numels), sum(numels)) == (816, 25_239_552)
    sizes = [2 * 4 * numel for numel in numels]
    parts = partition(sizes, 16)
    assert loads(sizes, parts) == [sum(sizes) // 16] * 16
    assert [part.start for part in parts] == [3 * 17 * i for i in range(16)]


def test_cuts_ten_thousand_skewed_units_quickly() -> None:
    rng = random.Random(0)
    sizes = [int(512 * rng.paretovariate(0.7)) for _ in range(10_000)]
    before = time.process_time()
    parts = partition(sizes, 1_000)
    # It takes hundredths of a second; anything quadratic takes several.
    assert time.process_time() - before < 1
    assert len(parts) == 1_000
    assert max(loads(sizes, parts)) * 1_000 <= sum(sizes) + max(sizes) * 1_000
