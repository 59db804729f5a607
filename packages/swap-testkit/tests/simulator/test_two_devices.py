# SPDX-License-Identifier: Apache-2.0
"""One optimizer with parameters on two devices of one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from swap_testkit.torch import assert_same_bits, simulator
from swap_torch import SwapOptimizerConfig, swap_optimizer
from swap_torch.adam import TorchNativeAdamWAdapter
from swap_torch.runner import Runner

DEVICE = "simnpu"


def make(numel: int = 3000, **fields: Any) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(numel, generator=generator) for _ in range(8)]
    params = [
        torch.nn.Parameter(value.to(f"{DEVICE}:{index % 2}")) for index, value in enumerate(values)
    ]
    optimizer = torch.optim.AdamW(params)
    return swap_optimizer(optimizer, SwapOptimizerConfig(**fields)) if fields else optimizer


def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
    params = optimizer.param_groups[0]["params"]
    for step in range(steps):
        optimizer.zero_grad()
        # Each device has its own thread in this.
        torch.autograd.backward(
            [sum((p * p * (step + 1)).sum() for p in params[first::2]) for first in range(2)]
        )
        optimizer.step()


def test_updates_in_the_backward_pass_begin_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Runner.begin

    def slowly(self: Runner, *args: Any, **options: Any) -> None:
        time.sleep(0.01)  # in which the other device's thread gets to the same place
        begin(self, *args, **options)

    monkeypatch.setattr(Runner, "begin", slowly)
    native, swapped = make(), make(swap_times=4, overlap_backward=True)
    for optimizer in (native, swapped):
        train(optimizer, 6)
    assert_same_bits(native, swapped)
    assert simulator.races() == []


def test_states_are_there_after_a_first_update_that_fails_on_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    native, swapped = make(), make(swap_times=2, min_numel=0)
    with monkeypatch.context() as patch:
        patch.setattr(TorchNativeAdamWAdapter, "step_batch", fail)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            train(swapped, 1)
    for entry in swapped.state.values():
        assert not entry["exp_avg"].any()
    assert swapped.swap_report().states  # type: ignore[attr-defined]
    assert len(swapped.state_dict()["state"]) == 8
    for optimizer in (native, swapped):
        train(optimizer, 2)
    assert_same_bits(native, swapped)


def test_auto_lets_stay_what_fits_on_each_device() -> None:
    native, swapped = make(50_000), make(50_000, swap_times=8, offload="auto")
    train(native, 5)
    for index, room in enumerate((64 << 20, 3 << 20)):
        simulator.set_memory_limit(torch.accelerator.memory_allocated(index) + room, index)
    try:
        train(swapped, 5)
    finally:
        simulator.set_memory_limit(None)
    assert_same_bits(native, swapped)
    report = swapped.swap_report()  # type: ignore[attr-defined]
    assert "all of them stay" in report.decision
    assert report.decision.count("had never been taken on") == 2
    stay = {state.owner for state in report.states if state.stays is not None}
    assert {f"group 0, parameter {index}" for index in range(0, 8, 2)} <= stay
