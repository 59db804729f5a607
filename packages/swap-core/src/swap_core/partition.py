# SPDX-License-Identifier: Apache-2.0
"""Cut the units of an update into batches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate, pairwise

__all__ = ["partition"]

_UNEVEN = 1.05
"""Neighbours differ so much that a step takes this many times what its bytes take one way."""


def partition(
    sizes: Sequence[int], batches: int, *, joined: Collection[int] = ()
) -> tuple[range, ...]:
    """Cut units into contiguous batches whose largest is as small as the order allows.

    The largest batch decides the arena, so it is minimised first (it never exceeds the average
    plus the largest unit); within that bound each cut is the one nearest to an even share. Where
    that makes batches now large, now small (three equal units in two batches, again and again), the
    large ones come first instead: a load goes on beside the store of a batch of its own size.

    Args:
        sizes: Bytes of each unit, in parameter order; each > 0.
        batches: Target number of batches, > 0.
        joined: Positions of units that must be in the batch of the unit before them.

    Returns:
        ``min(batches, units that may start a batch)`` non-empty ranges of positions, which in
        order cover all units; no ranges when there are no units.
    """
    starts = [i for i in range(len(sizes)) if i not in joined or i == 0]
    if not starts:
        return ()
    ends = [*starts[1:], len(sizes)]
    totals = [0, *accumulate(sum(sizes[a:b]) for a, b in zip(starts, ends, strict=True))]
    count = min(batches, len(starts))
    capacity = _smallest_capacity(totals, count)
    cuts = _even_cuts(totals, count, capacity)
    if _exchange(totals, cuts) > _UNEVEN * totals[-1]:
        large_first = _large_first(totals, cuts, capacity)
        if max(_sizes(totals, large_first)) <= capacity:
            cuts = min(cuts, large_first, key=partial(_exchange, totals))
    edges = [*(starts[cut] for cut in cuts), len(sizes)]
    return tuple(range(a, b) for a, b in pairwise(edges))


def _exchange(totals: Sequence[int], cuts: Sequence[int]) -> int:
    """Bytes that a link carries or waits for while a batch goes in and the one before it out."""
    return sum(map(max, pairwise(_sizes(totals, cuts))))


def _sizes(totals: Sequence[int], cuts: Sequence[int]) -> list[int]:
    return [totals[b] - totals[a] for a, b in pairwise((*cuts, len(totals) - 1))]


def _large_first(totals: Sequence[int], cuts: Sequence[int], capacity: int) -> list[int]:
    """As many batches as ``cuts`` makes, the early ones as full as they may be.

    That is up to ``capacity``, and as long as the rest could be no smaller than the smallest of
    ``cuts``.
    """
    smallest = min(_sizes(totals, cuts))
    filled = [0]
    for j in range(1, len(cuts)):
        left = len(cuts) - j
        fits = bisect_right(totals, totals[filled[-1]] + capacity) - 1
        leaves = bisect_right(totals, totals[-1] - left * smallest) - 1
        filled.append(max(filled[-1] + 1, min(fits, leaves, len(totals) - 1 - left)))
    return filled


def _even_cuts(totals: Sequence[int], count: int, capacity: int) -> list[int]:
    """First atom of each batch. ``totals[i]`` is the size of the atoms before ``i``."""
    earliest = _earliest_cuts(totals, count, capacity)
    cuts = [0]
    for j in range(1, count):
        even = bisect_left(totals, totals[-1] * j / count)
        if even > 0 and totals[even] - totals[-1] * j / count > (
            totals[-1] * j / count - totals[even - 1]
        ):
            even -= 1
        latest = bisect_right(totals, totals[cuts[-1]] + capacity) - 1
        last_with_atoms_left = len(totals) - 1 - (count - j)
        lower = max(earliest[j], cuts[-1] + 1)
        cuts.append(max(lower, min(even, latest, last_with_atoms_left)))
    return cuts


def _smallest_capacity(totals: Sequence[int], count: int) -> int:
    """Smallest size into which ``count`` contiguous batches fit, by bisection."""
    largest = max(b - a for a, b in pairwise(totals))
    low, high = max(largest, -(-totals[-1] // count)), totals[-1]
    while low < high:
        middle = (low + high) // 2
        if _batches_needed(totals, middle) <= count:
            high = middle
        else:
            low = middle + 1
    return low


def _batches_needed(totals: Sequence[int], capacity: int) -> int:
    needed = position = 0
    while position < len(totals) - 1:
        position = bisect_right(totals, totals[position] + capacity) - 1
        needed += 1
    return needed


def _earliest_cuts(totals: Sequence[int], count: int, capacity: int) -> list[int]:
    """For each batch the earliest start from which the rest still fits into ``capacity``."""
    earliest = [0] * count
    end = len(totals) - 1
    for j in range(count - 1, -1, -1):
        end = bisect_left(totals, totals[end] - capacity, 0, end)
        earliest[j] = end
    return earliest
