# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import Span, SwapSlot, UpdateUnit, align


def unit_of(nbytes: list[int]) -> UpdateUnit[str]:
    slots, offset = [], 0
    for number, n in enumerate(nbytes):
        span = Span(0, offset, align(n))
        slots.append(SwapSlot("group 0, parameter 0", f"state {number}", (n,), "uint8", n, span))
        offset = span.end
    return UpdateUnit("weight", 0, 0, tuple(slots))


@given(st.lists(st.integers(1, 10**9), max_size=4))
@settings(deadline=None)
def test_moves_the_bytes_of_its_spans_alignment_included(nbytes: list[int]) -> None:
    assert unit_of(nbytes).nbytes == sum(align(n) for n in nbytes)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
@settings(deadline=None)
def test_ends_a_span_where_the_next_one_may_start(offset: int, nbytes: int) -> None:
    span = Span(1, offset, nbytes)
    assert (span.end - span.offset, span.end - span.nbytes) == (nbytes, offset)


def test_cannot_be_changed() -> None:
    unit = unit_of([4])
    for thing, field in (
        (unit, "slots"),
        (unit.slots[0], "nbytes"),
        (unit.slots[0].span, "nbytes"),
    ):
        with pytest.raises(FrozenInstanceError, match=field):
            setattr(thing, field, 0)
