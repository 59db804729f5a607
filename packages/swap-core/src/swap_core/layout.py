# SPDX-License-Identifier: Apache-2.0
"""Where bytes go: host segments, spans in them, and runs between a segment and an arena.

Everything here is integers. Host bytes are laid out in registration order, the states of one
parameter side by side, so a run of parameters is one copy whatever their dtypes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, islice

from swap_core.slot import Span

__all__ = ["ALIGNMENT", "HostRounding", "Run", "align", "cover", "place", "runs_of"]

ALIGNMENT = 512
"""Bytes. CUDA's and Ascend's device allocators hand out multiples of 512, and Ascend's copy engine
wants aligned ends on both sides; the same relative offset on both sides keeps one copy per run."""


class HostRounding(Enum):
    """What the allocator of pinned host memory makes of a request."""

    EXACT = "exact"
    """A request takes what it asks for."""

    POWER_OF_TWO = "power of two"
    """A request takes the next power of two (torch's and torch_npu's pinned allocators)."""

    def taken(self, nbytes: int) -> int:
        """Bytes that a request of ``nbytes`` > 0 takes."""
        return nbytes if self is HostRounding.EXACT else 1 << (nbytes - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Run:
    """One contiguous copy between host span ``span`` and byte ``arena_offset`` of an arena."""

    span: Span
    arena_offset: int


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(
    units: Sequence[Sequence[int]], *, rounding: HostRounding, first_segment: int = 0
) -> tuple[list[list[Span]], list[int]]:
    """Give every state a span in new host segments.

    Args:
        units: For each unit the bytes of its states; each > 0.
        rounding: What the host allocator does to a request.
        first_segment: Number of the first new segment.

    Returns:
        The spans, shaped as ``units``, each starting and ending at a multiple of
        :data:`ALIGNMENT`; and the bytes of each new segment. A state never lies in two segments.
    """
    sizes = [align(nbytes) for unit in units for nbytes in unit]
    spans: list[Span] = []
    segments: list[int] = []
    for count in cover(sizes, rounding):
        cursor = 0
        for nbytes in sizes[len(spans) : len(spans) + count]:
            spans.append(Span(first_segment + len(segments), cursor, nbytes))
            cursor += nbytes
        segments.append(cursor)
    rest = iter(spans)
    return [list(islice(rest, len(unit))) for unit in units], segments


def cover(sizes: Sequence[int], rounding: HostRounding) -> list[int]:
    """Choose how many consecutive states go into each host segment.

    With :attr:`HostRounding.EXACT` that is one segment. Otherwise the cheapest cover, where a
    segment costs the power of two that it really takes, plus 1/512 of the whole so that a few
    bytes are not saved by many small segments (a segment border inside a batch is one more copy).

    Args:
        sizes: Bytes of each state, in order.
        rounding: What the host allocator does to a request.

    Returns:
        States per segment, in order.
    """
    if not sizes:
        return []
    if rounding is HostRounding.EXACT:
        return [len(sizes)]
    totals = [0, *accumulate(sizes)]
    fee = max(ALIGNMENT, totals[-1] // 512)
    powers = [1 << bit for bit in range((totals[-1] - 1).bit_length() + 1)]
    cost, start = [0], [0]
    for end in range(1, len(totals)):
        # For each power of two only the earliest start that fits matters: covering less is
        # never dearer.
        choices = []
        for power in powers:
            first = bisect_left(totals, totals[end] - power)
            if first < end:
                choices.append((cost[first] + power + fee, first))
        best, first = min(choices)
        cost.append(best)
        start.append(first)
    counts = []
    end = len(sizes)
    while end:
        counts.append(end - start[end])
        end = start[end]
    return counts[::-1]


def runs_of(spans: Sequence[Span]) -> list[Run]:
    """Join spans, in the order given, into the fewest contiguous copies of an arena.

    The arena is filled from byte 0 in the same order, so a byte's distance from the start of its
    run is the same on both sides.
    """
    runs: list[Run] = []
    filled = 0
    for span in spans:
        last = runs[-1].span if runs else None
        if last is not None and last.segment == span.segment and last.end == span.offset:
            joined = Span(last.segment, last.offset, last.nbytes + span.nbytes)
            runs[-1] = Run(joined, runs[-1].arena_offset)
        else:
            runs.append(Run(span, filled))
        filled += span.nbytes
    return runs
