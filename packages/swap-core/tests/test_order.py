# SPDX-License-Identifier: Apache-2.0
"""The waits are enough, whatever stream is fast, and none of them is superfluous."""

from __future__ import annotations

from itertools import permutations
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

KINDS = pytest.mark.parametrize("kind", ["packed", "per tensor"])
PRIORITIES = list(permutations(["compute", "load", "store"]))
SIZES = [40, 90, 30, 80, 50]


@KINDS
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=8),
    st.integers(2, 4),
    st.sampled_from(PRIORITIES),
)
@settings(deadline=None)
def test_updates_every_byte_once_per_run_whatever_stream_goes_first(
    recording: ModuleType, kind: str, sizes: list[int], arenas: int, priority: tuple[str, ...]
) -> None:
    rig = recording.Rig(kind, sizes, arenas=arenas, device=recording.Recorder(priority))
    for _ in range(3):
        rig.run()
    rig.device.drain()
    assert rig.changed == [*range(len(sizes))] * 3
    assert rig.values() == rig.expected()
    assert rig.device.violations == []


@KINDS
def test_has_no_wait_that_could_be_left_out(recording: ModuleType, kind: str) -> None:
    def is_right_without(wait: int, priority: tuple[str, ...]) -> bool:
        device = recording.Recorder(priority)
        device.forgotten_wait = wait
        rig = recording.Rig(kind, SIZES, device=device)
        rig.run()
        rig.run()
        device.drain()
        return bool(rig.values() == rig.expected() and not device.violations)

    complete = recording.Rig(kind, SIZES)
    complete.run()
    needless = [
        wait
        for wait in range(complete.device.waits)
        if all(is_right_without(wait, priority) for priority in PRIORITIES)
    ]
    waits = [call for call in complete.device.calls if call.startswith("wait")]
    assert [waits[wait] for wait in needless] == []
