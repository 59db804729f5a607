# SPDX-License-Identifier: Apache-2.0
"""Cut the units of an update into batches, and put these in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

__all__ = ["partition", "update_order"]

_UNEVEN = 1.01
"""Neighbours differ so much that a step takes this many times what its bytes take one way. Little,
since kernels take their share of what a step may take too."""


def partition(
    sizes: Sequence[int], batches: int, *, joined: Collection[int] = ()
) -> tuple[range, ...]:
    """Cut units into contiguous batches whose largest is as small as the order allows.

    The largest batch decides the arena, so it is minimised first (it never exceeds the average
    plus the largest unit); within that bound each cut is the one nearest to an even share.

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
    edges = [*(starts[cut] for cut in cuts), len(sizes)]
    return tuple(range(a, b) for a, b in pairwise(edges))


def update_order(sizes: Sequence[int]) -> tuple[int, ...]:
    """Put batches in the order in which their updates take the least time.

    While a batch goes in, one before it goes out, and the link waits for the larger of the two.
    Where neighbours are of about one size, that is the order of the parameters. Where they are now
    large, now small, the largest come first: then each load is beside the store of a batch of
    nearly its own size. Then an update takes at most 1.01 times the longest of its loads, its
    stores and, with two arenas, half of its loads, updates and stores together; besides its largest
    batch in, updated and out.

    Args:
        sizes: Bytes of each batch, in parameter order.

    Returns:
        The positions of all batches.
    """
    exchanged = sum(map(max, pairwise(sizes)))
    if exchanged <= _UNEVEN * sum(sizes):
        return tuple(range(len(sizes)))
    return tuple(sorted(range(len(sizes)), key=lambda position: -sizes[position]))


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
