# SPDX-License-Identifier: Apache-2.0
"""Traces on a device of its own, timed by its events."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from swap_core import TraceLane, read_trace
from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Link, Schedule


@pytest.mark.parametrize("packed", [True, False])
def test_a_trace_changes_nothing_in_any_schedule(
    pipelines: ModuleType, schedule: Schedule, packed: bool, tmp_path: Path
) -> None:
    twins = pipelines.Twins(packed=packed)
    twins.step()
    with twins.swapped.trace(tmp_path / "trace.json"):
        twins.step()
        twins.step()
    twins.step()
    twins.check()
    spans = read_trace(tmp_path / "trace.json")
    assert {span.device for span in spans} == {f"{pipelines.DEVICE}:0"}
    seen = Counter(span.lane for span in spans)
    batches = len(pipelines.PARAMETERS)
    assert seen[TraceLane.LOAD] == seen[TraceLane.STORE] == 2 * batches
    assert seen[TraceLane.UPDATE] == 2 * (batches + 1)


def test_copies_take_as_long_as_the_link_says(pipelines: ModuleType, tmp_path: Path) -> None:
    twins = pipelines.Twins(swap_times=3)
    twins.step()
    simulator.set_schedule(Schedule.THREADS, link=Link(latency=0.02))
    with twins.swapped.trace(tmp_path / "trace.json"):
        twins.step()
    spans = read_trace(tmp_path / "trace.json")
    copies = [span for span in spans if span.lane in (TraceLane.LOAD, TraceLane.STORE)]
    assert len(copies) == 6
    assert all(span.seconds >= 0.02 for span in copies)
    # Two loads run before the first update can: the compute stream stands still.
    (wait,) = (span for span in spans if span.name == "wait for load[0]")
    assert wait.seconds >= 0.015
