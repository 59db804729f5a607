# SPDX-License-Identifier: Apache-2.0
"""Traces of real updates."""

from __future__ import annotations

from collections import Counter

import pytest
from mindspore import nn

from swap_core import TraceLane, read_trace


def test_each_batch_of_each_update_is_there(kit, tmp_path) -> None:
    pair, file = kit.make_twins(nn.Adam, swap_times=3), tmp_path / "trace.json"
    pair.step()
    with pair.swapped.trace(file):
        pair.step(2)
    pair.step()
    spans = read_trace(file)
    seen = Counter((span.lane, span.name) for span in spans)
    for kind in (TraceLane.LOAD, TraceLane.UPDATE, TraceLane.STORE):
        assert [seen[kind, f"{kind.value}[{i}]"] for i in range(3)] == [2, 2, 2]
    assert seen[TraceLane.HOST, "step"] == seen[TraceLane.HOST, "wait for store[2]"] == 2
    sizes = pair.swapped.swap_report().batch_bytes
    assert [s.nbytes for s in spans if s.lane is TraceLane.LOAD] == [*sizes, *sizes]
    assert {span.device for span in spans} == {"CPU"}


def test_a_trace_of_what_raises_is_written_and_nothing_is_left(kit, tmp_path) -> None:
    pair, file = kit.make_twins(nn.Adam, swap_times=3), tmp_path / "trace.json"

    def fail_after_an_update() -> None:
        with pair.swapped.trace(file):
            pair.step()
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_after_an_update()
    assert len(read_trace(file)) > 9
    assert pair.swapped._swap._plan.lane.pipeline.device is pair.swapped._swap.device
    pair.step()


def test_a_bad_file_is_refused_before_anything_runs(kit, tmp_path) -> None:
    pair = kit.make_twins(nn.Adam)
    with pytest.raises(OSError, match="trace: "), pair.swapped.trace(tmp_path):
        pytest.fail("the body ran")


def test_one_trace_at_a_time(kit, tmp_path) -> None:
    pair = kit.make_twins(nn.Adam)
    with (
        pair.swapped.trace(tmp_path / "one.json"),
        pytest.raises(RuntimeError, match="being traced already"),
        pair.swapped.trace(tmp_path / "two.json"),
    ):
        pytest.fail("the body ran")
    assert not (tmp_path / "two.json").exists()
