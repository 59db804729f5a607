# SPDX-License-Identifier: Apache-2.0
"""check_order: on logs written by hand, and against a search of the graph of all edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_testkit import Op, Region, Unordered, check_order

DEVICE, HOST = Region("device", 0, 64), Region("host", 0, 64)


def copy_in(device: Region = DEVICE, host: Region = HOST, stream: str = "load") -> Op:
    return Op("copy_in", stream, reads=(host,), writes=(device,))


def copy_out(device: Region = DEVICE, host: Region = HOST, stream: str = "store") -> Op:
    return Op("copy_out", stream, reads=(device,), writes=(host,))


def update(*touched: Region) -> Op:
    return Op("update", "compute", reads=touched or (DEVICE,), writes=touched or (DEVICE,))


def record(stream: str, event: int = 0) -> Op:
    return Op("record", stream, event)


def wait(stream: str, event: int = 0) -> Op:
    return Op("synchronize" if stream == "host" else "wait", stream, event)


def pairs(log: Sequence[Op]) -> set[tuple[int, int]]:
    """Positions of the accesses that check_order finds unordered."""
    position = {id(op): i for i, op in enumerate(log)}
    return {(position[id(each.earlier)], position[id(each.later)]) for each in check_order(log)}


# Ordered.

ORDERED = {
    "empty": [],
    "on one stream": [copy_in(), copy_out(stream="load"), copy_in()],
    "reads only": [copy_out(host=Region("a", 0, 64)), Op("host_read", "host", reads=(DEVICE,))],
    "other buffers": [copy_in(), copy_out(Region("other", 0, 64), Region("copy", 0, 64))],
    "by an event": [copy_in(), record("load"), wait("compute"), update()],
    "by a chain of events": [
        copy_in(),
        record("load", 0),
        wait("compute", 0),
        record("compute", 1),  # the compute stream did nothing else
        wait("store", 1),
        copy_out(),
    ],
    "by a wait long before": [
        copy_in(),
        record("load"),
        wait("compute"),
        update(Region("other", 0, 8)),
        update(),
    ],
    "by the host": [copy_out(), record("store"), wait("host"), copy_in()],
    "a host read": [
        copy_out(),
        record("store"),
        wait("host"),
        Op("host_read", "host", None, (HOST,)),
    ],
    "work after a host read": [Op("host_read", "host", reads=(HOST,)), copy_out()],
    "by the host, through another stream": [
        copy_out(),
        record("store", 0),
        wait("compute", 0),
        record("compute", 1),
        wait("host", 1),
        copy_in(),
    ],
    "by an event recorded again": [
        record("load"),
        copy_in(),
        record("load"),
        wait("compute"),
        update(),
    ],
    "by the earlier record, though the event is recorded again": [
        copy_in(),
        record("load"),
        wait("compute"),
        record("store"),
        update(),
    ],
}


@pytest.mark.parametrize("log", ORDERED.values(), ids=ORDERED.keys())
def test_finds_nothing_in_what_is_ordered(log: list[Op]) -> None:
    assert check_order(log) == []


# Unordered.

UNORDERED = {
    "write, read": ([copy_in(), copy_out(host=Region("a", 0, 64))], {(0, 1)}),
    "read, write": ([copy_out(host=Region("a", 0, 64)), copy_in()], {(0, 1)}),
    "write, write": ([copy_in(), Op("restore", "compute", writes=(DEVICE,))], {(0, 1)}),
    "two streams, both in the wrong": ([copy_in(), update(), copy_out()], {(0, 1), (0, 2), (1, 2)}),
    "the wait before the record": (
        [copy_in(), wait("compute"), record("load"), update()],
        {(0, 3)},
    ),
    "the record before the copy": (
        [record("load"), copy_in(), wait("compute"), update()],
        {(1, 3)},
    ),
    "another event": ([copy_in(), record("load", 0), wait("compute", 1), update()], {(0, 3)}),
    "another stream waits": ([copy_in(), record("load"), wait("store"), update()], {(0, 3)}),
    "recorded again elsewhere": (
        [copy_in(), record("load"), record("store"), wait("compute"), update()],
        {(0, 4)},
    ),
    "the host waits too late": (
        [copy_out(), record("store"), copy_in(), wait("host")],
        {(0, 2)},
    ),
    "the host reads too early": ([copy_out(), Op("host_read", "host", reads=(HOST,))], {(0, 1)}),
    "an event orders backwards only": (
        [record("compute"), wait("load"), update(), copy_in()],
        {(2, 3)},
    ),
}


@pytest.mark.parametrize(("log", "expected"), UNORDERED.values(), ids=UNORDERED.keys())
def test_finds_what_nothing_orders(log: list[Op], expected: set[tuple[int, int]]) -> None:
    assert pairs(log) == expected


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (0, 16, False),  # touches from below
        (0, 17, True),
        (16, 32, True),
        (20, 24, True),
        (31, 64, True),
        (32, 64, False),  # touches from above
        (0, 64, True),
    ],
)
def test_regions_that_only_touch_do_not_conflict(start: int, end: int, found: bool) -> None:
    one, other = Region("device", 16, 32), Region("device", start, end)
    assert one.overlaps(other) == other.overlaps(one) == found
    assert not one.overlaps(Region("host", start, end))
    assert bool(check_order([copy_in(one), update(other)])) == found


def test_tells_both_accesses_the_bytes_and_the_missing_edge() -> None:
    log = [copy_in(Region("arena", 512, 1024)), update(Region("arena", 512, 1024))]
    found = check_order(log)
    assert [(each.earlier, each.later, each.region.buffer) for each in found] == [
        (log[0], log[1], "arena"),
        (log[0], log[1], "arena"),
    ], "the update reads and writes"
    assert str(found[0]) == (
        "update on compute is not ordered after copy_in on load (512 bytes of arena): "
        "compute must wait for an event that load records after its copy_in"
    )


# Against all paths.

STREAMS = st.sampled_from(["compute", "load", "store", "host"])
REGIONS = st.builds(
    lambda buffer, start, size: Region(buffer, start, start + size),
    st.sampled_from("ab"),
    st.integers(0, 3),
    st.integers(1, 3),
)
ACCESSES = st.builds(
    lambda stream, reads, writes: Op("access", stream, None, tuple(reads), tuple(writes)),
    STREAMS,
    st.lists(REGIONS, max_size=2),
    st.lists(REGIONS, max_size=1),
)
EDGES = st.builds(
    lambda make, stream, event: make(stream, event),
    st.sampled_from([record, wait]),
    STREAMS,
    st.integers(0, 2),
)
LOGS = st.lists(st.one_of(ACCESSES, EDGES), max_size=12)


def precedes(log: Sequence[Op]) -> list[list[bool]]:
    """The transitive closure of program order, events, and the host that queues everything."""
    size = len(log)
    before = [[False] * size for _ in range(size)]
    for j, later in enumerate(log):
        for i, earlier in enumerate(log[:j]):
            before[i][j] = earlier.stream in (later.stream, "host")
        if later.verb in ("wait", "synchronize"):
            records = [
                i for i, op in enumerate(log[:j]) if (op.verb, op.event) == ("record", later.event)
            ]
            if records:
                before[records[-1]][j] = True
    for k in range(size):
        for i in range(size):
            for j in range(size):
                before[i][j] |= before[i][k] and before[k][j]
    return before


def conflicts(log: Sequence[Op]) -> Counter[tuple[int, int, Region]]:
    """What check_order must find, with positions in the log."""
    before = precedes(log)
    accesses = [
        (i, region, writes)
        for i, op in enumerate(log)
        for regions, writes in ((op.reads, False), (op.writes, True))
        for region in regions
    ]
    return Counter(
        (i, j, region)
        for i, other, wrote in accesses
        for j, region, writes in accesses
        if i < j and not before[i][j] and (wrote or writes) and _bytes(other) & _bytes(region)
    )


def _bytes(region: Region) -> set[tuple[object, int]]:
    return {(region.buffer, byte) for byte in range(region.start, region.end)}


@given(LOGS)
@settings(deadline=None)
def test_finds_what_no_path_of_edges_orders(log: list[Op]) -> None:
    log = [Op(op.verb, op.stream, op.event, op.reads, op.writes) for op in log]  # distinct objects
    position = {id(op): i for i, op in enumerate(log)}
    found = Counter(
        (position[id(each.earlier)], position[id(each.later)], each.region)
        for each in check_order(log)
    )
    assert found == conflicts(log)


@given(LOGS)
@settings(deadline=None)
def test_the_edge_that_a_message_asks_for_is_what_was_missing(log: list[Op]) -> None:
    log = [Op(op.verb, op.stream, op.event, op.reads, op.writes) for op in log]
    found = check_order(log)
    if not found:
        return
    problem: Unordered = found[0]
    repaired: list[Op] = []
    for op in log:
        repaired += [wait(op.stream, 99)] if op is problem.later else []
        repaired.append(op)
        repaired += [record(op.stream, 99)] if op is problem.earlier else []
    left = [(each.earlier, each.later) for each in check_order(repaired)]
    assert not any(a is problem.earlier and b is problem.later for a, b in left)
    assert len(left) < len(found)
