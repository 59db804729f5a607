# SPDX-License-Identifier: Apache-2.0
"""States that users make of those that they are shown, which are on the host."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swap_testkit.torch import assert_same_bits, same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"


def make(*sizes: int, **fields: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(DEVICE)) for n in sizes]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    return swap_optimizer(optimizer, SwapOptimizerConfig(**fields)) if fields else optimizer


def step(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator, device="cpu").to(DEVICE)
    optimizer.step()


CUTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "clone": lambda value, numel: value[:numel].clone(),
    "mask": lambda value, numel: value[torch.arange(2000, device=value.device) < numel],
    "view": lambda value, numel: value[:numel],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("left", [1500, 500])
@pytest.mark.parametrize("budget", [0, 1.0])
def test_a_parameter_that_is_replaced_by_a_smaller_one(cut: str, left: int, budget: float) -> None:
    """Pruning, another vocabulary: what is too small to swap then goes to the device."""
    both = make(2000), make(2000, min_numel=1024, device_budget=budget)
    for optimizer in both:
        step(optimizer, 0)
        (old,) = optimizer.param_groups[0]["params"]
        entry = optimizer.state.pop(old)
        new = torch.nn.Parameter(old.detach()[:left].clone())
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = CUTS[cut](entry[key], left)
        optimizer.param_groups[0]["params"] = [new]
        optimizer.state[new] = entry
        step(optimizer, 1)
        step(optimizer, 2)
    assert_same_bits(*both)


@pytest.mark.parametrize("phase", ["reload", "offload", "states_on_device", "step"])
@pytest.mark.parametrize("budget", [0, 0.5])
def test_a_state_that_is_replaced_by_one_like_it(phase: str, budget: float) -> None:
    both = make(2000, 3000), make(2000, 3000, min_numel=1, device_budget=budget)
    for optimizer in both:
        step(optimizer, 0)
        for entry in optimizer.state.values():
            entry["exp_avg"] = torch.zeros_like(entry["exp_avg"], device="cpu")
            if optimizer is both[0]:
                entry["exp_avg"] = entry["exp_avg"].to(DEVICE)
    swapped = both[1]
    if phase == "states_on_device":
        with swapped.states_on_device():
            kinds = {v["exp_avg"].device.type for v in swapped.state.values()}
            assert kinds == {DEVICE}
            step(swapped, 1)
        step(both[0], 1)
    elif phase != "step":
        getattr(swapped, phase)()
    for number in (2, 3):
        for optimizer in both:
            step(optimizer, number)
    assert_same_bits(*both)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("budget", [0.5, 30_000])
def test_the_budget_of_a_copy_decides_anew(copied: Callable[[Any], Any], budget: float) -> None:
    both = make(3000), make(3000, min_numel=1, device_budget=budget)
    for optimizer in both:
        step(optimizer, 0)
        late = torch.nn.Parameter(torch.ones(5000, device=DEVICE))
        optimizer.add_param_group({"params": [late]})
        step(optimizer, 1)
    both[1].param_groups[0]["lr"] = both[0].param_groups[0]["lr"] = 0.01
    native, swapped = both[0], copied(both[1])
    for optimizer in (native, swapped):
        step(optimizer, 2)
        step(optimizer, 3)
    for one, other in zip(native.param_groups, swapped.param_groups, strict=True):
        for p, q in zip(one["params"], other["params"], strict=True):
            assert same_bits(p, q)


@pytest.mark.parametrize("packed", [True, False])
def test_a_default_device_changes_nothing(packed: bool) -> None:
    """Host memory is on the host."""
    both = make(3000, 2000), make(3000, 2000, min_numel=1, packed_swap=packed)
    with torch.device(DEVICE):
        step(both[1], 0)
        held = both[1].state_dict()
        step(both[1], 1)
        both[1].load_state_dict(held)
        both[1].reload()
        both[1].offload()
        step(both[1], 1)
    for number in (0, 1):
        step(both[0], number)
    for p, q in zip(*(o.param_groups[0]["params"] for o in both), strict=True):
        assert both[1].state[q]["exp_avg"].device.type == "cpu"
        assert same_bits(both[0].state[p]["exp_avg"], both[1].state[q]["exp_avg"])
    assert both[1].swap_report().pinned
