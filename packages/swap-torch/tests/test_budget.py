# SPDX-License-Identifier: Apache-2.0
"""States that stay on the device because there is room: ``device_budget`` and ``offload``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swap_core import StayReason
from swap_testkit.torch import CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig as Config
from swap_torch import swap_optimizer
from swap_torch.budget import Budget
from swap_torch.forms import Form

SHAPES = [(1000,), (3000,), (500,), (2000,), (10,)]
"""Bytes of both states: 8 times as many."""


def resident(optimizer: Any) -> list[int]:
    """Positions of the parameters whose states stay because there is room."""
    states = optimizer.swap_report().states
    names = {s.owner for s in states if s.stays is StayReason.BUDGET}
    params = [f"group 0, parameter {index}" for index in range(len(SHAPES))]
    assert names <= set(params)
    return [index for index, name in enumerate(params) if name in names]


@pytest.mark.parametrize(
    ("budget", "stay"),
    [
        (0, []),
        (8 * 999, [2, 4]),
        (8 * 1000, [0]),
        (8 * 1500, [0, 2]),
        (8 * 4000, [0, 1]),
        (8 * 4015, [0, 1, 4]),
        (10**9, [0, 1, 2, 3, 4]),
        (0.0, []),
        (0.25, [0, 2, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_the_first_states_that_fit_stay(
    packed: bool,
    budget: Any,
    stay: list[int],
    twins: Callable[..., Any],
    train: Callable[..., None],
) -> None:
    config = Config(min_numel=0, swap_times=3, device_budget=budget, packed_swap=packed)
    pair = twins(SHAPES, config=config)
    train(pair, 4)
    assert resident(pair.swapped) == stay
    ledger = pair.swapped._swap.ledger
    moved = sum(8 * SHAPES[i][0] for i in range(len(SHAPES)) if i not in stay)
    report = pair.swapped.swap_report()
    assert report.swapped_bytes == moved
    assert report.resident_bytes == sum(8 * shape[0] for shape in SHAPES) - moved
    assert (ledger.bytes_loaded == 0) == (moved == 0)
    for index, p in enumerate(pair.swapped.param_groups[0]["params"]):
        kept = pair.swapped._swap._table.swapped(p) == {}
        assert kept == (index in stay)


def test_states_from_before_wrapping_and_from_a_checkpoint_stay_too(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    config = Config(min_numel=0, device_budget=0.5)
    pair = twins(SHAPES, config=config, native_steps=2)
    assert resident(pair.swapped) == [0, 2, 4]
    pair.swapped.load_state_dict(pair.native.state_dict())
    assert resident(pair.swapped) == [0, 2, 4]
    train(pair, 2)


def test_parameters_that_come_later_get_what_is_left(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins(SHAPES, config=Config(min_numel=0, device_budget=8 * 1600))
    train(pair, 2)
    assert resident(pair.swapped) == [0, 2, 4]
    for optimizer in (pair.native, pair.swapped):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(n)) for n in (80, 90)]})
    train(pair, 2)
    stays = {(s.owner, s.stays) for s in pair.swapped.swap_report().states}
    assert ("group 1, parameter 0", StayReason.BUDGET) in stays
    assert ("group 1, parameter 1", None) in stays


def test_a_budget_decides_on_each_parameter_once() -> None:
    budget = Budget(100)
    params = [torch.zeros(1) for _ in range(4)]
    budget.decide({params[0]: 60, params[1]: 50})
    budget.decide({params[1]: 10, params[2]: 40, params[3]: 0})
    assert [budget.keeps(p) for p in params] == [True, False, True, False]
    assert budget.resident_bytes == 100
    budget.keep_only(params[1:])
    assert (budget.resident_bytes, budget.knows(params[0])) == (40, False)
    budget.keep({params[1]: 10, params[2]: 40}, {params[1]})
    budget.decide({params[1]: 10, params[2]: 40, params[3]: 1})
    assert [budget.keeps(p) for p in params] == [False, True, False, False]


@pytest.mark.parametrize(
    ("limit", "stay", "said"),
    [
        (10**6, [0, 1, 2, 3, 4], "all of them stay"),
        (90_000, [0, 2, 4], " KiB of them stay"),
        (56_000, [], "all of them swap"),
    ],
)
def test_auto_decides_from_memory_that_was_never_used(
    limit: int, stay: list[int], said: str, train: Callable[..., None], twins: Callable[..., Any]
) -> None:
    device = CpuAsDevice(limit=limit)
    config = Config(min_numel=0, swap_times=2, offload="auto")
    pair = twins(SHAPES, config=config, device=device)
    train(pair, 2)
    assert resident(pair.swapped) == []
    assert pair.swapped.swap_report().decision == ""
    train(pair, 1)
    assert resident(pair.swapped) == stay
    decision = pair.swapped.swap_report().decision
    assert said in decision
    assert f"decided    {decision}" in str(pair.swapped.swap_report())
    loaded = pair.swapped._swap.ledger.bytes_loaded
    train(pair, 3)
    assert resident(pair.swapped) == stay
    assert (pair.swapped._swap.ledger.bytes_loaded == loaded) == (len(stay) == len(SHAPES))


def test_auto_goes_on_swapping_where_there_is_no_room_after_all(
    train: Callable[..., None], twins: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory may be in pieces; the update that found out was made, and raises nothing."""
    config = Config(min_numel=0, offload="auto")
    pair = twins(SHAPES, config=config, device=CpuAsDevice(limit=10**6))
    train(pair, 2)
    empty_on, made = Form.empty_on, []

    def in_pieces(form: Form, device: torch.device) -> torch.Tensor:
        made.append(form)
        if len(made) == 4:
            raise torch.OutOfMemoryError("planted")
        return empty_on(form, device)

    monkeypatch.setattr(Form, "empty_on", in_pieces)
    train(pair, 1)
    assert len(made) == 4
    assert resident(pair.swapped) == []
    assert "no room for them in one piece" in pair.swapped.swap_report().decision
    monkeypatch.undo()
    train(pair, 2)
    assert resident(pair.swapped) == []


def test_host_memory_of_states_that_stay_is_given_back(
    train: Callable[..., None], twins: Callable[..., Any]
) -> None:
    device = CpuAsDevice(limit=10**6)
    pair = twins(SHAPES, config=Config(min_numel=0, offload="auto"), device=device)
    train(pair, 2)
    assert device.host_bytes > 0
    train(pair, 1)
    assert device.host_bytes == 0


@pytest.mark.parametrize("way", ["prefetch", "overlap_backward", "zigzag"])
def test_budgets_go_with_every_schedule(way: str) -> None:
    on: Any = {"prefetch": "backward"}.get(way, True)
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)]) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    native, other = (torch.optim.AdamW(net.parameters()) for net in nets)
    config = Config(min_numel=0, swap_times=3, device_budget=0.4, **{way: on})
    swap_optimizer(other, config, device=CpuAsDevice(poison=True))
    for _ in range(6):
        for net, optimizer in zip(nets, (native, other), strict=True):
            optimizer.zero_grad()
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert_same_bits(native, other)
