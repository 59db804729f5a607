# SPDX-License-Identifier: Apache-2.0
"""States that change their parameter or key, and states whose values are put elsewhere."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swap_testkit.torch import CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

WAYS = [{}, {"packed_swap": False}, {"zigzag": True}]


class Twins:
    """Two parameters, updated natively and swapped."""

    def __init__(self, way: dict[str, Any], kind: Any = torch.optim.AdamW) -> None:
        self.both: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            self.both.append(kind([torch.nn.Parameter(torch.randn(50)) for _ in range(2)], lr=0.1))
        config = SwapOptimizerConfig(min_numel=0, **way)
        swap_optimizer(self.both[1], config, device=CpuAsDevice(poison=True))
        self.steps = 0

    def step(self, *active: int) -> None:
        self.steps += 1
        for optimizer in self.both:
            generator = torch.Generator().manual_seed(self.steps)
            for index, param in enumerate(optimizer.param_groups[0]["params"]):
                grad = torch.randn(50, generator=generator)
                param.grad = grad if index in (active or (0, 1)) else None
            optimizer.step()
        assert_same_bits(*self.both)

    def each(self, change: Callable[[Any], object]) -> None:
        for optimizer in self.both:
            change(optimizer)


def params_of(optimizer: Any) -> list[Any]:
    found: list[Any] = optimizer.param_groups[0]["params"]
    return found


def exchange(optimizer: Any) -> None:
    one, other = (optimizer.state[param] for param in params_of(optimizer))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def exchange_entries(optimizer: Any) -> None:
    state, (p, q) = optimizer.state, params_of(optimizer)
    state[p], state[q] = state[q], state[p]


def hand_over(optimizer: Any) -> None:
    p, q = params_of(optimizer)
    optimizer.state[p] = optimizer.state.pop(q)


def replace_parameter(optimizer: Any) -> None:
    params = params_of(optimizer)
    new = torch.nn.Parameter(params[0].detach().clone())
    optimizer.state[new] = optimizer.state.pop(params[0])
    params[0] = new


def exchange_keys(optimizer: Any) -> None:
    entry = optimizer.state[params_of(optimizer)[0]]
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"].abs(), entry["exp_avg"].abs()


def put_back(optimizer: Any) -> None:
    p = params_of(optimizer)[0]
    optimizer.state[p] = optimizer.state.pop(p)


CHANGES = [exchange, exchange_entries, hand_over, replace_parameter, exchange_keys, put_back]
THEN: dict[str, Callable[[Any], object]] = {
    "nothing": lambda optimizer: None,
    "load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "load a copy": lambda optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "clear": lambda optimizer: optimizer.state.clear(),
    "new": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("change", CHANGES)
def test_no_two_parameters_live_in_one_memory(
    change: Callable[[Any], None], then: str, way: dict[str, Any]
) -> None:
    """Although the one that gave its state away has no gradient in the next update."""
    twins = Twins(way)
    twins.step()
    twins.step()
    twins.each(change)
    twins.step(0)
    twins.each(THEN[then])
    twins.step()
    twins.step()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("before", [True, False], ids=["held before", "held after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_dict_does_not_change_when_states_change_owners(
    change: Callable[[Any], None], before: bool, way: dict[str, Any]
) -> None:
    twins = Twins(way)
    twins.step()
    if before:
        held = twins.both[1].state_dict()
        twins.each(change)
    else:
        twins.each(change)
        held = twins.both[1].state_dict()
    expected = copy.deepcopy(held["state"])
    for _ in range(2):
        twins.step()
        for index, entry in expected.items():
            for key, value in entry.items():
                assert torch.equal(held["state"][index][key], value), (index, key)


def put_elsewhere(optimizer: Any) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"].data = torch.full((50,), 7.0)


def on_device(optimizer: Any) -> None:
    if hasattr(optimizer, "states_on_device"):
        with optimizer.states_on_device():
            pass


USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: None,
    "load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "reload": lambda optimizer: hasattr(optimizer, "reload") and optimizer.reload(),
    "offload": lambda optimizer: hasattr(optimizer, "offload") and optimizer.offload(),
    "states_on_device": on_device,
}


@pytest.mark.parametrize("use", USES)
def test_values_that_were_put_elsewhere_are_the_states(use: str) -> None:
    """With ``state.data = ...``, which leaves the tensor object what it was."""
    twins = Twins({})
    twins.step()
    twins.each(put_elsewhere)
    saved = [optimizer.state_dict()["state"] for optimizer in twins.both]
    for index, entry in saved[0].items():
        assert torch.equal(entry["exp_avg"], saved[1][index]["exp_avg"])
    twins.each(USES[use])
    assert_same_bits(*twins.both)
    twins.step()
    twins.step()


IN_ROLLOUTS: dict[str, Callable[[Any], Any]] = {
    **USES,
    "report": lambda optimizer: hasattr(optimizer, "swap_report") and optimizer.swap_report(),
    "deepcopy": copy.deepcopy,
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "another step": lambda optimizer: optimizer.step(),
    "a step of another plan": lambda optimizer: (
        setattr(params_of(optimizer)[0], "grad", None),
        optimizer.step(),
    ),
}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("way", WAYS[:2], ids=str)
@pytest.mark.parametrize("use", IN_ROLLOUTS)
def test_what_is_done_in_inference_mode_can_be_updated_outside(
    use: str, way: dict[str, Any], kind: Any
) -> None:
    """Reinforcement learning makes its rollouts in it, with the states elsewhere."""
    twins = Twins(way, kind)
    twins.step()
    held = twins.both[1].state_dict()
    with torch.inference_mode():
        twins.each(IN_ROLLOUTS[use])
    twins.step()
    twins.step()
    assert held["state"]


def test_wrapping_in_inference_mode() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(50))])
    param = params_of(optimizer)[0]
    param.grad = torch.ones(50)
    optimizer.step()
    with torch.inference_mode():
        swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=CpuAsDevice())
    optimizer.step()
    assert optimizer.state[param]["step"] == 2
