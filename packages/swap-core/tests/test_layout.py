# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import ALIGNMENT, HostRounding, Span, align, cover, place, runs_of

UNITS = st.lists(st.lists(st.integers(1, 5_000), min_size=1, max_size=4), max_size=30)
ROUNDINGS = st.sampled_from(HostRounding)


def power_of_two(nbytes: int) -> int:
    """The smallest power of two that holds ``nbytes``."""
    power = 1
    while power < nbytes:
        power *= 2
    return power


@given(st.integers(0, 10**15))
@settings(deadline=None)
def test_aligns_to_the_next_multiple(nbytes: int) -> None:
    assert align(nbytes) % ALIGNMENT == 0
    assert 0 <= align(nbytes) - nbytes < ALIGNMENT


@given(UNITS, ROUNDINGS, st.integers(0, 5))
@settings(deadline=None)
def test_places_each_state_on_aligned_bytes_of_its_own(
    units: list[list[int]], rounding: HostRounding, first_segment: int
) -> None:
    spans, sizes = place(units, rounding=rounding, first_segment=first_segment)
    assert [[span.nbytes for span in unit] for unit in spans] == [
        [align(nbytes) for nbytes in unit] for unit in units
    ]
    # In order, without a gap, and each segment is filled exactly: so nothing overlaps.
    cursor = dict.fromkeys(range(first_segment, first_segment + len(sizes)), 0)
    for span in (span for unit in spans for span in unit):
        assert span.offset % ALIGNMENT == 0
        assert span.offset == cursor[span.segment]
        cursor[span.segment] = span.end
    assert list(cursor.values()) == sizes


@given(UNITS, ROUNDINGS)
@settings(deadline=None)
def test_lays_states_out_in_order_and_each_in_one_segment(
    units: list[list[int]], rounding: HostRounding
) -> None:
    spans, _ = place(units, rounding=rounding)
    places = [(span.segment, span.offset) for unit in spans for span in unit]
    assert places == sorted(places)


@given(UNITS)
@settings(deadline=None)
def test_makes_one_segment_of_exactly_the_sum_where_nothing_is_rounded(
    units: list[list[int]],
) -> None:
    total = sum(align(nbytes) for unit in units for nbytes in unit)
    assert place(units, rounding=HostRounding.EXACT)[1] == ([total] if units else [])


@given(st.lists(st.integers(1, 40).map(lambda blocks: blocks * ALIGNMENT), max_size=10))
@settings(deadline=None)
def test_finds_the_cheapest_cover_by_powers_of_two(sizes: list[int]) -> None:
    def cost(counts: list[int]) -> int:
        edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
        fee = max(ALIGNMENT, sum(sizes) // 512)
        return sum(power_of_two(sum(sizes[a:b])) + fee for a, b in pairwise(edges))

    counts = cover(sizes, HostRounding.POWER_OF_TWO)
    assert sum(counts) == len(sizes)
    if not sizes:
        return
    assert min(counts) > 0
    inner = range(1, len(sizes))
    oracle = min(
        cost([b - a for a, b in pairwise((0, *cuts, len(sizes)))])
        for number in range(len(sizes))
        for cuts in combinations(inner, number)
    )
    assert cost(counts) == oracle


def llama(*, hidden: int, ffn: int, layers: int, vocab: int, kv: int) -> list[int]:
    attention = [hidden * hidden, kv * hidden, kv * hidden, hidden * hidden]
    layer = [*attention, *[ffn * hidden] * 3, hidden, hidden]
    return [vocab * hidden, *layer * layers, hidden, vocab * hidden]


def gpt2(*, hidden: int, layers: int) -> list[int]:
    h = hidden
    layer = [h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h]
    return [50257 * h, 1024 * h, *layer * layers, h, h]


MODELS = {
    "Llama 2 7B": llama(hidden=4096, ffn=11008, layers=32, vocab=32000, kv=4096),
    "Llama 2 13B": llama(hidden=5120, ffn=13824, layers=40, vocab=32000, kv=5120),
    "Llama 2 70B": llama(hidden=8192, ffn=28672, layers=80, vocab=32000, kv=1024),
    "Llama 3 8B": llama(hidden=4096, ffn=14336, layers=32, vocab=128256, kv=1024),
    "GPT-2 XL": gpt2(hidden=1600, layers=48),
    "the RFC's": [*[65_536, 64] * 8, 1_024] * 48,
    "powers of two": [2**20, 2**18, 2**22] * 24,
    "equal": [30_931] * 816,
    "one": [2**22],
    # These need a segment border between the states of one parameter here and there.
    "TinyLlama 1.1B": llama(hidden=2048, ffn=5632, layers=22, vocab=32000, kv=256),
    "Qwen 2.5 0.5B": llama(hidden=896, ffn=4864, layers=24, vocab=151936, kv=128),
    "GPT-2 small": gpt2(hidden=768, layers=12),
    "powers of two and vectors": [2**20, 2**10, 2**20, 2**12] * 24,
}


@pytest.mark.parametrize(
    "numels", [pytest.param(numels, id=name) for name, numels in MODELS.items()]
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_takes_at_most_two_percent_more_pinned_memory_than_the_states_of_a_model_need(
    numels: list[int], itemsize: int
) -> None:
    units = [[numel * itemsize] * 2 for numel in numels]
    _, sizes = place(units, rounding=HostRounding.POWER_OF_TWO)
    assert sum(map(power_of_two, sizes)) <= 1.02 * sum(map(sum, units))


def test_keeps_the_segments_of_a_model_few() -> None:
    # Each border inside a batch is one more copy in each direction.
    for numels in MODELS.values():
        _, sizes = place([[4 * n] * 2 for n in numels], rounding=HostRounding.POWER_OF_TWO)
        assert len(sizes) <= 16


@st.composite
def scattered_spans(draw: st.DrawFn) -> list[Span]:
    """Spans of a few segments, in order, with gaps here and there."""
    spans, cursor = [], {0: 0, 1: 0, 2: 0}
    for _ in range(draw(st.integers(0, 25))):
        segment = draw(st.sampled_from([0, 0, 0, 1, 2]))
        offset = cursor[segment] + draw(st.sampled_from([0, 0, 0, 512, 1536]))
        spans.append(Span(segment, offset, draw(st.integers(1, 4)) * ALIGNMENT))
        cursor[segment] = spans[-1].end
    return spans


@given(scattered_spans())
@settings(deadline=None)
def test_copies_every_byte_to_the_place_that_the_order_of_spans_gives_it(
    spans: list[Span],
) -> None:
    wanted = [
        (span.segment, span.offset + block)
        for span in spans
        for block in range(0, span.nbytes, ALIGNMENT)
    ]
    runs = runs_of(spans)
    copied = {
        run.arena_offset + block: (run.span.segment, run.span.offset + block)
        for run in runs
        for block in range(0, run.span.nbytes, ALIGNMENT)
    }
    assert [copied[i * ALIGNMENT] for i in range(len(wanted))] == wanted
    assert sum(run.span.nbytes for run in runs) == len(wanted) * ALIGNMENT


@given(scattered_spans())
@settings(deadline=None)
def test_makes_runs_that_cannot_be_joined_further(spans: list[Span]) -> None:
    for run, following in pairwise(runs_of(spans)):
        assert following.arena_offset == run.arena_offset + run.span.nbytes
        assert (run.span.segment, run.span.end) != (
            following.span.segment,
            following.span.offset,
        )


def test_makes_one_run_of_consecutive_units_in_one_segment() -> None:
    spans, sizes = place([[100, 700], [512], [1]], rounding=HostRounding.EXACT)
    (run,) = runs_of([span for unit in spans for span in unit])
    assert (run.span, run.arena_offset) == (Span(0, 0, sizes[0]), 0)
