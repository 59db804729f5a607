# SPDX-License-Identifier: Apache-2.0
"""Parameters that get gradients now and then, and sets of parameters that change."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from swap_core import UnsupportedOptionError
from swap_testkit.torch import CopySchedule, CpuAsDevice
from swap_torch import SwapOptimizerConfig, swap_optimizer

BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
SHAPES = [(3, 5), (), (40,), (7, 2), (200,), (11,)]


def config(packed: bool, swap_times: int = 3, min_numel: int = 2) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(min_numel=min_numel, swap_times=swap_times, packed_swap=packed)


def expert(step: int, position: int) -> bool:
    """The first parameter always, of the others one of four sets in turn."""
    return position == 0 or (position + step) % 4 == 0


def coin(step: int, position: int) -> bool:
    return random.Random(100 * step + position).random() < 0.5


@BOTH
def test_sets_that_come_back_reuse_their_plans(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed), amsgrad=True)
    train(pair, 4, expert)
    before = pair.swapped.swap_report().ledger
    train(pair, 12, expert)
    after = pair.swapped.swap_report().ledger
    assert before.plans_built == after.plans_built == 4
    assert before.views_made == after.views_made
    assert before.host_allocations == after.host_allocations


@BOTH
def test_any_set_in_any_order(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """More sets than plans are kept; parameters whose first gradient comes late; empty sets."""
    for options in ({}, {"fused": True}):
        pair = twins(SHAPES, config=config(packed), **options)
        train(pair, 2, [False] * 6)
        train(pair, 25, coin)
        assert pair.swapped.swap_report().ledger.plans_built > 8


@BOTH
def test_frozen_and_unfrozen(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    for frozen in ((0, 2), (), (1, 3, 4), (0, 1, 2, 3, 4, 5), (5,)):
        for position, both in enumerate(pair.pairs()):
            for param in both:
                param.requires_grad_(position not in frozen)
        train(pair, 2)


@BOTH
def test_groups_that_are_added_later(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES[:2], config=config(packed))
    for number, options in enumerate([{}, {"amsgrad": True, "lr": 0.1}, {"fused": True}]):
        train(pair, number)  # the first one before any step
        for optimizer in (pair.native, pair.swapped):
            params = [nn.Parameter(torch.linspace(0, 1, n)) for n in (9, 1, 30)]
            optimizer.add_param_group({"params": params, **options})
        train(pair, 2)
        train(pair, 2, expert)
    assert len(pair.swapped.swap_report().states) == 2 * 2 + 3 * 2 + 3 * 3 + 3 * 2


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
def test_group_that_cannot_swap_is_not_added(
    twins: Callable[..., Any], train: Callable[..., None], option: str
) -> None:
    pair = twins(SHAPES, Adam)
    train(pair, 1)
    group = {"params": [nn.Parameter(torch.ones(4))], option: True}
    with pytest.raises(UnsupportedOptionError, match=f"{option}=True in the new param group 1"):
        pair.swapped.add_param_group(group)
    train(pair, 1)


@BOTH
@pytest.mark.parametrize("optimizer_class", [Adam, AdamW])
def test_states_from_before_wrapping(
    twins: Callable[..., Any],
    train: Callable[..., None],
    optimizer_class: type[Optimizer],
    packed: bool,
) -> None:
    gone: list[weakref.ref[torch.Tensor]] = []

    def watch(optimizer: Optimizer) -> None:
        optimizer.state.pop(optimizer.param_groups[0]["params"][3])  # not all have states
        gone[:] = [
            weakref.ref(state["exp_avg"]) for p, state in optimizer.state.items() if p.numel() > 1
        ]

    pair = twins(
        SHAPES, optimizer_class, config=config(packed), native_steps=3, prepare=watch, amsgrad=True
    )
    assert len(gone) == 4
    assert not any(state() is not None for state in gone)  # their memory is free
    assert pair.swapped.swap_report().swapped_bytes == 3 * 4 * (15 + 40 + 200 + 11)
    train(pair, 2, expert)
    train(pair, 2)


def replace_parameters(optimizer: Optimizer, *, move_states: bool) -> None:
    """As trainers do when they shard the model after the optimizer was made."""
    for group in optimizer.param_groups:
        new = [nn.Parameter(p.detach() * 2) for p in group["params"]]
        for p, q in zip(group["params"], new, strict=True):
            state = optimizer.state.pop(p)
            if move_states:
                optimizer.state[q] = state
        group["params"] = new


@BOTH
@pytest.mark.parametrize("first", ["train", "load"])
@pytest.mark.parametrize("states", ["moved", "left"])
def test_parameter_objects_that_are_replaced(
    twins: Callable[..., Any], train: Callable[..., None], states: str, first: str, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    if first == "load":
        for optimizer in (pair.native, pair.swapped):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    old = [weakref.ref(q) for _, q in pair.pairs()]
    for optimizer in (pair.native, pair.swapped):
        replace_parameters(optimizer, move_states=states == "moved")
    train(pair, 2)
    gc.collect()
    assert not any(param() is not None for param in old)


@BOTH
@pytest.mark.parametrize("states", ["moved", "left"])
def test_replaced_parameters_leave_no_host_memory_behind(
    twins: Callable[..., Any], train: Callable[..., None], states: str, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    before = pair.device.host_bytes
    for _ in range(3):
        replace_parameters(pair.native, move_states=states == "moved")
        replace_parameters(pair.swapped, move_states=states == "moved")
        train(pair, 2)
        gc.collect()
    assert pair.device.host_bytes == pair.swapped.swap_report().host_bytes == before


@BOTH
def test_several_optimizers_on_one_device(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    device = CpuAsDevice(schedule=CopySchedule.RANDOM, seed=3, poison=True)
    pairs = [
        twins(SHAPES, Adam, config=config(True), device=device, amsgrad=True),
        twins(SHAPES, AdamW, config=config(packed, 100), device=device),
        twins(SHAPES[::-1], AdamW, config=config(packed, 1), device=device, fused=True),
    ]
    for _ in range(3):
        for pair in pairs:
            train(pair, 1)
    for pair in pairs:
        pair.check()
    assert device.host_bytes == sum(pair.swapped.swap_report().host_bytes for pair in pairs)


@BOTH
def test_deleted_optimizer_releases_host_memory(packed: bool) -> None:
    device = CpuAsDevice()
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(50))]
    optimizer = swap_optimizer(AdamW(params), config(packed), device=device)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = optimizer.state[params[0]]["exp_avg"]
    values = kept.clone()
    taken = device.host_bytes
    assert taken == 4 * 512
    del optimizer
    gc.collect()
    assert device.host_bytes == taken  # a user still holds a state
    assert torch.equal(kept, values)
    del kept
    gc.collect()
    assert device.host_bytes == 0
