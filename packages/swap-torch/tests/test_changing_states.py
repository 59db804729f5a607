# SPDX-License-Identifier: Apache-2.0
"""States that are changed from outside between updates, as native optimizers allow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from swap_torch import SwapOptimizerConfig

BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
SHAPES = [(3, 5), (), (40,), (7, 2), (200,), (11,), (9,), (9,)]


def config(packed: bool, swap_times: int = 3) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(min_numel=2, swap_times=swap_times, packed_swap=packed)


def expert(step: int, position: int) -> bool:
    """The first parameter always, of the others one of four sets in turn."""
    return position == 0 or (position + step) % 4 == 0


def state_of(optimizer: Optimizer, position: int) -> dict[str, torch.Tensor]:
    return optimizer.state[optimizer.param_groups[0]["params"][position]]


def zero_in_place(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def edit_elements(optimizer: Optimizer) -> None:
    state_of(optimizer, 2)["exp_avg_sq"][3:7] = 5.0
    state_of(optimizer, 4)["exp_avg"].mul_(-2)


def replace_tensors(optimizer: Optimizer) -> None:
    for position in (0, 2, 5):
        state = state_of(optimizer, position)
        state["exp_avg"] = state["exp_avg"] + 1


def replace_with_other_strides(optimizer: Optimizer) -> None:
    state = state_of(optimizer, 0)
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def replace_and_put_back(optimizer: Optimizer) -> None:
    state = state_of(optimizer, 4)
    kept = state["exp_avg"]
    state["exp_avg"] = torch.ones_like(kept)
    state["exp_avg"] = kept


def set_counters(optimizer: Optimizer) -> None:
    state_of(optimizer, 0)["step"].fill_(50)
    state_of(optimizer, 2)["step"] = torch.tensor(7.0)


def forget_one(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][2]]


def forget_all(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def replace_dict(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict, {p: dict(s) for p, s in optimizer.state.items()})


def exchange_keys(optimizer: Optimizer) -> None:
    state = state_of(optimizer, 4)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs_()


def exchange_parameters(optimizer: Optimizer) -> None:
    """As if two parameters of one shape were reordered."""
    one, other = optimizer.param_groups[0]["params"][6:8]
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


EDITS = [
    zero_in_place,
    edit_elements,
    replace_tensors,
    replace_with_other_strides,
    replace_and_put_back,
    set_counters,
    forget_one,
    forget_all,
    replace_dict,
    exchange_keys,
    exchange_parameters,
]


@BOTH
@pytest.mark.parametrize("swap_times", [1, 100])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_between_updates_are_honoured(
    twins: Callable[..., Any],
    train: Callable[..., None],
    edit: Callable[[Optimizer], None],
    swap_times: int,
    packed: bool,
) -> None:
    pair = twins(SHAPES, config=config(packed, swap_times))
    train(pair, 2)
    for mask in (None, expert):
        edit(pair.native)
        edit(pair.swapped)
        train(pair, 3, mask)
    train(pair, 1)
    assert pair.device.host_bytes == pair.swapped.swap_report().host_bytes


@BOTH
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@pytest.mark.parametrize("swap_times", [1, 100])
@pytest.mark.parametrize("masks", ["all", "some"])
def test_one_state_of_two_parameters(
    twins: Callable[..., Any],
    train: Callable[..., None],
    masks: str,
    swap_times: int,
    when: str,
    packed: bool,
) -> None:
    def share(optimizer: Optimizer) -> None:
        state_of(optimizer, 6)["exp_avg"] = state_of(optimizer, 7)["exp_avg"]

    if when == "before wrapping":
        pair = twins(SHAPES, config=config(packed, swap_times), native_steps=2, prepare=share)
    else:
        pair = twins(SHAPES, config=config(packed, swap_times))
        train(pair, 2)
        share(pair.native)
        share(pair.swapped)
    train(pair, 3)
    if masks == "some":
        train(pair, 4, expert)


@BOTH
@pytest.mark.parametrize("by", ["clear", "replace"])
def test_states_that_are_set_aside_and_put_back(
    twins: Callable[..., Any], train: Callable[..., None], by: str, packed: bool
) -> None:
    """The optimizer does not write into tensors that it was told to forget."""
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    both = (pair.native, pair.swapped)
    kept = [{p: dict(state) for p, state in optimizer.state.items()} for optimizer in both]
    for optimizer in both:
        if by == "clear":
            optimizer.state.clear()
        else:
            for state in optimizer.state.values():
                state.update({key: value * 0 for key, value in state.items()})
    train(pair, 2)
    for optimizer, states in zip(both, kept, strict=True):
        optimizer.state.update(states)
    pair.check()
    train(pair, 2)
