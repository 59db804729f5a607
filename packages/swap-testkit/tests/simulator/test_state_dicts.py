# SPDX-License-Identifier: Apache-2.0
"""State dicts, loading, ``reload()`` and ``offload()`` where host and device memory differ."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from swap_testkit.torch import same_bits, simulator
from swap_testkit.torch.simulator import Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"
SHAPES = [(3, 50), (), (40,), (7, 2), (200,)]
pytestmark = [
    pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"]),
    pytest.mark.parametrize("fused", [True, False], ids=["fused", "for-loop"]),
]


class Pair:
    """A native and a swapped AdamW on the simulated accelerator."""

    def __init__(self, packed: bool, fused: bool) -> None:
        self.native, self.swapped = (
            torch.optim.AdamW(self._parameters(), lr=0.1, fused=fused) for _ in range(2)
        )
        # Two parameters swap, two have states that stay.
        config = SwapOptimizerConfig(min_numel=30, swap_times=3, packed_swap=packed)
        swap_optimizer(self.swapped, config)
        self.steps = 0

    @staticmethod
    def _parameters() -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        return [torch.nn.Parameter(value.to(DEVICE)) for value in values]

    def train(self, steps: int) -> None:
        """Step both; they must agree."""
        for _ in range(steps):
            self.steps += 1
            self.step(self.native)
            self.step(self.swapped)
        self.check()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)
        optimizer.step()

    def check(self) -> None:
        params = (o.param_groups[0]["params"] for o in (self.native, self.swapped))
        for p, q in zip(*params, strict=True):
            assert same_bits(p, q)
            for key, value in self.native.state[p].items():
                assert same_bits(value, self.swapped.state[q][key])


def devices(optimizer: torch.optim.Optimizer) -> set[str]:
    return {value.device.type for state in optimizer.state.values() for value in state.values()}


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    result: dict[str, Any] = torch.load(file, weights_only=True)
    return result


def test_a_state_dict_is_on_the_host_and_does_not_change(
    schedule: Schedule, packed: bool, fused: bool
) -> None:
    pair = Pair(packed, fused)
    pair.train(2)
    held = pair.swapped.state_dict()
    expected = copy.deepcopy(pair.native.state_dict()["state"])
    pair.train(2)
    for index, entry in expected.items():
        for key, value in entry.items():
            assert held["state"][index][key].device.type == "cpu"
            assert same_bits(held["state"][index][key], value)
    assert simulator.races() == []


def test_files_both_ways(schedule: Schedule, packed: bool, fused: bool) -> None:
    pair = Pair(packed, fused)
    pair.train(2)
    native, swapped = saved(pair.native), saved(pair.swapped)
    pair.train(1)
    pair.native.load_state_dict(swapped)
    pair.swapped.load_state_dict(native)
    pair.check()
    pair.train(2)
    assert simulator.races() == []


def test_phases(schedule: Schedule, packed: bool, fused: bool) -> None:
    """Offloaded, nothing is on the device; the first update brings back what stays there."""
    pair = Pair(packed, fused)
    pair.train(1)
    state_dict = saved(pair.swapped)
    for _ in range(2):
        pair.swapped.offload()
        assert devices(pair.swapped) == {"cpu"}
        pair.check()
        copied = copy.deepcopy(pair.swapped)
        assert devices(copied) == {"cpu"}
        pair.step(copied)
        pair.train(1)
        assert devices(pair.swapped) == {"cpu", DEVICE}
        pair.swapped.reload()
        assert devices(pair.swapped) == devices(pair.native)
        pair.train(2)
    with pair.swapped.states_on_device():
        for optimizer in (pair.native, pair.swapped):
            for state in optimizer.state.values():
                state["exp_avg"].mul_(2)
    pair.check()
    pair.swapped.offload()
    for optimizer in (pair.native, pair.swapped):
        optimizer.load_state_dict(copy.deepcopy(state_dict))
    assert devices(pair.swapped) == {"cpu"}
    pair.train(2)
    assert simulator.races() == []
