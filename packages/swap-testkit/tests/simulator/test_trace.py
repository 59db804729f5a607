# SPDX-License-Identifier: Apache-2.0
"""Traces on a device of its own, timed by its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from swap_core import TraceLane, TraceSpan, read_trace
from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Link, Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"
BATCHES = 4
NBYTES = 2 * 4 * 2048
"""Of the states of a batch: each of them is one parameter."""

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "per tensor": {"packed_swap": False},
    "prefetch": {"prefetch": "backward"},
    "prefetch per tensor": {"prefetch": "backward", "packed_swap": False},
    "zigzag": {"zigzag": True},
    "zigzag and prefetch": {"zigzag": True, "prefetch": "backward"},
    "overlap": {"overlap_backward": True},
    "overlap per tensor": {"overlap_backward": True, "packed_swap": False},
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


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


class Training:
    """Of parameters that are a batch each; after some updates, so that each way is under way."""

    def __init__(self, way: str) -> None:
        self.params = [torch.nn.Parameter(torch.ones(2048).to(DEVICE)) for _ in range(BATCHES)]
        config = SwapOptimizerConfig(swap_times=BATCHES, **WAYS[way])
        self.optimizer: Any = swap_optimizer(torch.optim.AdamW(self.params, fused=True), config)
        for _ in range(4):
            self.backward()
            self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.stack([param.square().sum() for param in self.params]).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def step_aside(self) -> None:
        """On a stream that is current for that long only."""
        self.backward()
        main, side = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
        side.wait_stream(main)
        with side:
            self.optimizer.step()
        main.wait_stream(side)


ENDS: dict[str, Callable[[Training], None]] = {
    "step": Training.step,
    "step on another stream": Training.step_aside,
    "backward pass": Training.backward,
}


@EACH_WAY
@pytest.mark.parametrize("end", ENDS)
def test_a_trace_may_end_anywhere(way: str, end: str, schedule: Schedule, tmp_path: Path) -> None:
    training, file = Training(way), tmp_path / "trace.json"
    with training.optimizer.trace(file):
        training.step()
        ENDS[end](training)
    training.optimizer.step()
    torch.accelerator.synchronize()
    spans = read_trace(file)
    assert all(span.seconds >= 0 for span in spans)
    check_update(way, [span for span in spans if span.update == 1])


@EACH_WAY
def test_each_update_has_all_that_was_done_for_it(
    way: str, schedule: Schedule, tmp_path: Path
) -> None:
    training, file = Training(way), tmp_path / "trace.json"
    with training.optimizer.trace(file):
        for _ in range(3):
            training.step()
        kept = training.optimizer._swap.ledger.device_bytes > 0
    spans = read_trace(file)
    for number in (1, 2, 3):
        check_update(way, [span for span in spans if span.update == number])
    outside = [span.name for span in spans if span.update == 0 and span.lane is TraceLane.STORE]
    assert len(outside) == kept
    assert not [s for s in spans if s.update == 0 and s.lane in (TraceLane.LOAD, TraceLane.UPDATE)]


def check_update(way: str, spans: Sequence[TraceSpan]) -> None:
    """All of one update: a kept batch is neither loaded nor stored."""
    moved = BATCHES - bool(WAYS[way].get("zigzag"))
    for lane in (TraceLane.LOAD, TraceLane.STORE):
        copies = [span for span in spans if span.lane is lane]
        assert len({span.batch for span in copies}) == len(copies) == moved
        assert {span.nbytes for span in copies} == {NBYTES}
    updates = {span.batch for span in spans if span.lane is TraceLane.UPDATE}
    assert updates == {None, *range(BATCHES)}
    assert sum(span.name == "step" for span in spans) == 1
