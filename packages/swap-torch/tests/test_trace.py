# SPDX-License-Identifier: Apache-2.0
"""Traces of real updates, and ranges for profilers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile as torch_profile

from swap_core import TraceLane, TracingDevice, read_trace
from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, profiler_ranges, swap_optimizer

COUNT = 6
BATCHES = 3
NBYTES = 2 * 4 * 256
"""Of the states of each parameter."""


class Pair:
    """A native optimizer and its swapped twin; both make the same updates."""

    def __init__(self, packed: bool = True, device: CpuAsDevice | None = None) -> None:
        self.native, self.swapped = (self._optimizer() for _ in range(2))
        config = SwapOptimizerConfig(swap_times=BATCHES, min_numel=8, packed_swap=packed)
        swap_optimizer(self.swapped, config, device=device or CpuAsDevice())

    @staticmethod
    def _optimizer() -> Any:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(256, generator=generator) for _ in range(COUNT)]
        return torch.optim.AdamW([torch.nn.Parameter(v) for v in [*values, torch.ones(2)]])

    def step(self) -> None:
        for optimizer in (self.native, self.swapped):
            for number, param in enumerate(optimizer.param_groups[0]["params"]):
                param.grad = torch.full_like(param, 0.1 * number - 0.2)
            optimizer.step()


def counts(file: Path) -> dict[TraceLane, Counter[str]]:
    told: dict[TraceLane, Counter[str]] = {lane: Counter() for lane in TraceLane}
    for span in read_trace(file):
        told[span.lane][span.name] += 1
    return told


@pytest.mark.parametrize("schedule", CopySchedule)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("from_the_first_step_on", [True, False])
def test_each_batch_of_each_update_is_there(
    packed: bool, schedule: CopySchedule, from_the_first_step_on: bool, tmp_path: Path
) -> None:
    pair, file = Pair(packed, CpuAsDevice(schedule=schedule)), tmp_path / "trace.json"
    if not from_the_first_step_on:
        pair.step()
    with pair.swapped.trace(file):
        for _ in range(3):
            pair.step()
        pair.swapped.state  # noqa: B018
    pair.step()
    assert_same_bits(pair.native, pair.swapped)

    told = counts(file)
    for lane in (TraceLane.LOAD, TraceLane.STORE):
        assert told[lane] == {f"{lane.value}[{i}]": 3 for i in range(BATCHES)}
    updates = {f"update[{i}]": 3 for i in range(BATCHES)}
    assert told[TraceLane.UPDATE] == {"update of states that stay": 3, **updates}
    assert told[TraceLane.WAIT]["wait for load[0]"] == 3
    assert told[TraceLane.HOST]["step"] == 3
    assert told[TraceLane.HOST]["wait for store[2]"] == 1
    spans = read_trace(file)
    assert {span.device for span in spans} == {"cpu"}
    copies = [span for span in spans if span.lane in (TraceLane.LOAD, TraceLane.STORE)]
    assert {(span.batch, span.nbytes) for span in copies} == {
        (index, NBYTES * COUNT // BATCHES) for index in range(BATCHES)
    }
    assert {span.update for span in copies} == {1, 2, 3}


def test_stores_follow_their_update_and_updates_their_load(tmp_path: Path) -> None:
    pair, file = Pair(device=CpuAsDevice(schedule=CopySchedule.LATEST)), tmp_path / "trace.json"
    with pair.swapped.trace(file):
        pair.step()
    ends = {span.name: (span.start, span.end) for span in read_trace(file)}
    for index in range(BATCHES):
        load, update, store = (ends[f"{kind}[{index}]"] for kind in ("load", "update", "store"))
        assert load[0] < load[1] <= update[0] < update[1] <= store[0] < store[1]


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_is_left_of_a_trace(packed: bool, tmp_path: Path) -> None:
    device = CpuAsDevice()
    pair = Pair(packed, device)
    pair.step()
    with pair.swapped.trace(tmp_path / "trace.json"):
        pair.step()
    pipelines = [
        lane.pipeline for plan in pair.swapped._swap._plans.values() for lane in plan.lanes
    ]
    assert [pipeline.device for pipeline in pipelines] == [device]
    assert not pair.swapped._optimizer_step_pre_hooks
    assert not pair.swapped._optimizer_step_post_hooks
    assert pair.swapped._swap.ledger.plans_built == 1
    made = []
    device.create_event = lambda: made.append(1)  # type: ignore[method-assign, assignment]
    pair.step()
    assert not made


def test_a_trace_of_what_raises_is_written(tmp_path: Path) -> None:
    device = CpuAsDevice()
    pair, file = Pair(device=device), tmp_path / "trace.json"
    pair.step()
    copy_out, calls = device.copy_out, []

    def fails_once(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted")
        copy_out(*arguments)

    device.copy_out = fails_once  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted"), pair.swapped.trace(file):
        pair.step()
    told = counts(file)
    assert told[TraceLane.LOAD] == {"load[0]": 1, "load[1]": 1, "load[2]": 1}
    # Batch 1 is stored on the way back; batch 2 was loaded in vain.
    assert told[TraceLane.STORE] == {"store[0]": 1, "store[1]": 1}
    assert pair.swapped._swap.tracer is None
    pair.swapped.state_dict()


@pytest.mark.parametrize("fails", [1, 2])
def test_a_trace_whose_end_fails_is_over(fails: int, tmp_path: Path) -> None:
    """Whether the device fails once or twice while stores are waited for, and the file written."""
    device = CpuAsDevice()
    pair, file = Pair(device=device), tmp_path / "trace.json"
    pair.step()
    synchronize, left = device.synchronize, [1] * fails

    def planted(event: Any) -> None:
        if left:
            left.pop()
            raise RuntimeError("planted")
        synchronize(event)

    def step_and_plant() -> None:
        with pair.swapped.trace(file):
            pair.step()
            device.synchronize = planted  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="planted"):
        step_and_plant()
    assert pair.swapped._swap.tracer is None
    (plan,) = pair.swapped._swap._plans.values()
    assert plan.lanes[0].pipeline.device is device
    if fails == 1:
        assert counts(file)[TraceLane.STORE] == {f"store[{i}]": 1 for i in range(BATCHES)}
    else:
        assert not file.exists()
    with pair.swapped.trace(file):
        pair.step()
    assert counts(file)[TraceLane.HOST]["step"] == 1


def test_an_update_that_fails_has_a_number_of_its_own(tmp_path: Path) -> None:
    pair, file = Pair(), tmp_path / "trace.json"
    with pair.swapped.trace(file):
        pair.swapped.param_groups[0]["lr"] = "fast"
        with pytest.raises(TypeError):
            pair.step()
        pair.swapped.param_groups[0]["lr"] = 1e-3
        pair.swapped.step()
    found = {span.batch for span in read_trace(file) if span.update == 2}
    assert found == {None, *range(BATCHES)}
    assert [s.update for s in read_trace(file) if s.name == "step"] == [1, 2]


def test_what_begins_in_a_closure_belongs_to_its_step(tmp_path: Path) -> None:
    params = [torch.nn.Parameter(torch.ones(256)) for _ in range(COUNT)]
    config = SwapOptimizerConfig(
        swap_times=BATCHES, min_numel=8, prefetch="backward", allow_closure=True
    )
    optimizer: Any = swap_optimizer(torch.optim.AdamW(params), config, device=CpuAsDevice())

    def closure() -> float:
        optimizer.zero_grad()
        loss = torch.stack([param.square().sum() for param in params]).sum()
        loss.backward()
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)
    with optimizer.trace(tmp_path / "trace.json"):
        for _ in range(2):
            optimizer.step(closure)
    loads = [s for s in read_trace(tmp_path / "trace.json") if s.lane is TraceLane.LOAD]
    assert [(s.update, s.batch) for s in loads] == [(n, i) for n in (1, 2) for i in range(BATCHES)]


@pytest.mark.parametrize(("name", "error"), [("", OSError), ("missing/t.json", OSError)])
def test_a_bad_file_is_refused_before_anything_runs(
    name: str, error: type[Exception], tmp_path: Path
) -> None:
    pair = Pair()
    with pytest.raises(error, match="trace: "), pair.swapped.trace(tmp_path / name):
        pytest.fail("the body ran")
    assert pair.swapped._swap.tracer is None


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    pair = Pair()
    with pair.swapped.trace(tmp_path / "one.json"):
        with (
            pytest.raises(RuntimeError, match="being traced already"),
            pair.swapped.trace(tmp_path / "two.json"),
        ):
            pytest.fail("the body ran")
        pair.step()
    assert counts(tmp_path / "one.json")[TraceLane.LOAD]["load[0]"] == 1
    assert not (tmp_path / "two.json").exists()


def profile() -> torch_profile:
    """Keep events: torch 2.10 warns, once in a process, of those that it would clear."""
    return torch_profile(acc_events=True)


def ranges(profiler: torch_profile) -> Counter[str]:
    return Counter(event.name for event in profiler.events() if event.name.startswith("swap."))


ALL_RANGES = {f"swap.{kind}[{i}]": 1 for kind in ("load", "update", "store") for i in range(3)}


@pytest.mark.parametrize("packed", [True, False])
def test_a_profiler_sees_ranges(packed: bool) -> None:
    pair = Pair(packed)
    pair.step()
    with profile() as profiler:
        pair.step()
    pair.step()
    assert ranges(profiler) == ALL_RANGES
    assert_same_bits(pair.native, pair.swapped)


def test_without_a_profiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Noted(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            made.append(name)
            super().__init__(name)

    monkeypatch.setattr("swap_torch.profiling.record_function", Noted)
    pair = Pair()
    pair.step()
    assert made == []
    with profiler_ranges():
        pair.step()
    pair.step()
    assert Counter(made) == ALL_RANGES


def test_a_profiled_update_that_fails_leaves_nothing() -> None:
    device = CpuAsDevice()
    pair = Pair(device=device)
    pair.step()
    pair.swapped.param_groups[0]["lr"] = "fast"
    with profile(), pytest.raises(TypeError):
        pair.step()
    (plan,) = pair.swapped._swap._plans.values()
    assert plan.lanes[0].pipeline.device is device


def test_both_at_once(tmp_path: Path) -> None:
    pair, file = Pair(), tmp_path / "trace.json"
    with profile() as profiler, pair.swapped.trace(file):
        pair.step()
    assert ranges(profiler) == ALL_RANGES
    assert counts(file)[TraceLane.STORE] == {f"store[{i}]": 1 for i in range(BATCHES)}
    (plan,) = pair.swapped._swap._plans.values()
    assert not isinstance(plan.lanes[0].pipeline.device, TracingDevice)
