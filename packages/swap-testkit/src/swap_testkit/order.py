# SPDX-License-Identifier: Apache-2.0
"""Happens-before: find accesses that nothing orders, whatever the timing of one run was.

Vector clocks (Mattern 1988, Fidge 1988) over the streams and the host. Every operation has a
clock: how far each stream had come that it is certain to come after. A write and another access to
the same bytes are in order only if the earlier one is in the later one's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swap_testkit.recording import Op, Region

__all__ = ["Unordered", "check_order"]

Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Unordered:
    """Two accesses to the same bytes, at least one a write, that nothing orders."""

    earlier: Op
    later: Op
    region: Region
    """The later access."""
    nbytes: int
    """Bytes that both touch."""

    def __str__(self) -> str:
        """Name the accesses, the bytes, and the edge that is missing."""
        return (
            f"{self.later} is not ordered after {self.earlier} ({self.nbytes} bytes of "
            f"{self.region.buffer}): {self.later.stream} must wait for an event that "
            f"{self.earlier.stream} records after its {self.earlier.verb}"
        )


@dataclass(frozen=True, slots=True)
class _Access:
    op: Op
    tick: int
    """The position of ``op`` on its stream."""
    region: Region
    writes: bool


def check_order(log: Sequence[Op]) -> list[Unordered]:
    """Find every pair of conflicting accesses in a log that nothing orders.

    Work is queued by the host, so it comes after what the host had waited for; streams are in
    order; a wait comes after the latest record of its event before it.

    Args:
        log: The operations in the order in which the host queued them.
    """
    clocks: dict[str, Clock] = defaultdict(dict)
    events: dict[int, Clock] = {}
    accesses: dict[object, list[_Access]] = defaultdict(list)
    found: list[Unordered] = []
    for op in log:
        clock = clocks[op.stream]
        _advance(clock, clocks["host"])
        if op.event is not None and op.verb in ("wait", "synchronize"):
            _advance(clock, events.get(op.event, {}))
            continue
        clock[op.stream] = clock.get(op.stream, 0) + 1
        if op.event is not None:
            events[op.event] = dict(clock)
            continue
        for access in _accesses(op, clock[op.stream]):
            earlier = accesses[access.region.buffer]
            found += [
                Unordered(other.op, op, access.region, access.region.shared_bytes(other.region))
                for other in earlier
                if _conflict(other, access) and clock.get(other.op.stream, 0) < other.tick
            ]
        for access in _accesses(op, clock[op.stream]):
            accesses[access.region.buffer].append(access)
    return found


def _advance(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def _accesses(op: Op, tick: int) -> Iterable[_Access]:
    for region in op.reads:
        yield _Access(op, tick, region, writes=False)
    for region in op.writes:
        yield _Access(op, tick, region, writes=True)


def _conflict(one: _Access, other: _Access) -> bool:
    return (one.writes or other.writes) and one.region.overlaps(other.region)
