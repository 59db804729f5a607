# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's AdamW, by a stand-in with its interface."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from swap_core import UnsupportedOptimizerError
from swap_testkit.torch import CpuAsDevice, differences
from swap_testkit.torch.hyper_standin import HYPER_MODULE as NAME
from swap_testkit.torch.hyper_standin import AdamW, adamw
from swap_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer
from swap_torch.hyper import TorchHyperAdamWAdapter

WAYS = [(True, 1), (True, 3), (False, 2), (False, 100)]
SHAPES = [(3, 5), (), (40,), (7, 2)]


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in under the real name."""
    found = ModuleType(NAME)
    found.AdamW, found.adamw = AdamW, adamw
    monkeypatch.setitem(sys.modules, NAME, found)
    monkeypatch.setattr(AdamW, "__module__", NAME)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.0}, {"eps": 1e-2, "lr": 0.1}],
    ids=["default", "amsgrad", "maximize", "eps"],
)
@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
def test_same_bits(
    twins: Callable[..., Any],
    train: Callable[..., None],
    packed: bool,
    swap_times: int,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    config = SwapOptimizerConfig(min_numel=2, swap_times=swap_times, packed_swap=packed)
    pair = twins(SHAPES, AdamW, dtype=dtype, config=config, **options)
    train(pair, 4)
    train(pair, 2, [True, False, False, True])
    assert isinstance(pair.swapped, AdamW)
    keys = {"exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])}
    assert all(set(states) == keys for states in pair.swapped.state.values())
    report = pair.swapped.swap_report()
    assert report.optimizer == f"{NAME}.AdamW"
    assert report.packed is packed
    assert sum(s.stays is not None for s in report.states) == len(keys)  # those of shape ()


def test_default_is_packed(twins: Callable[..., Any]) -> None:
    assert (
        twins(SHAPES, AdamW, config=SwapOptimizerConfig(min_numel=0)).swapped.swap_report().packed
    )


@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
def test_groups_count_once_per_update(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool, swap_times: int
) -> None:
    """Whatever the number of batches, and also in groups without gradients."""
    groups = [
        {"params": [(5,), (6,), (7,), (8,), (9,)], "lr": 0.1},
        {"params": [(5,), (6,)], "amsgrad": True, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"params": [()], "maximize": True},  # stays
        {"params": [(4,)], "eps": 1e-3},
    ]
    config = SwapOptimizerConfig(min_numel=2, swap_times=swap_times, packed_swap=packed)
    pair = twins(groups, AdamW, config=config)
    nobody = [False] * 9
    train(pair, 2, nobody)
    assert [group["step"] for group in pair.swapped.param_groups] == [2] * 4
    train(pair, 3)
    train(pair, 2, [True, False, True, False, True, False, False, True, True])
    train(pair, 2, [False] * 5 + [True, True, False, False])
    assert [group["step"] for group in pair.swapped.param_groups] == [9] * 4


def test_states_from_before_wrapping(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    pair = twins(SHAPES, AdamW, native_steps=3, amsgrad=True)
    assert pair.swapped.swap_report().swapped_bytes > 0
    train(pair, 3)


def test_states_are_like_the_gradient(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins([(3, 4), (4,)], AdamW)
    for _ in range(2):
        pair.give_gradients()
        for p, q in list(pair.pairs())[:1]:
            p.grad, q.grad = p.grad.t().contiguous().t(), q.grad.t().contiguous().t()
        pair.native.step()
        pair.swapped.step()
        pair.check()
    assert pair.swapped.state[pair.swapped.param_groups[0]["params"][0]]["exp_avg"].stride() == (
        1,
        3,
    )


def test_state_dict_there_and_back(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    pair = twins(SHAPES, AdamW)
    train(pair, 2)
    fresh = twins(SHAPES, AdamW)
    fresh.swapped.load_state_dict(pair.native.state_dict())
    fresh.native.load_state_dict(pair.swapped.state_dict())
    train(fresh, 2)
    assert fresh.swapped.param_groups[0]["step"] == 4


def new() -> Optimizer:
    return AdamW([torch.nn.Parameter(torch.ones(4))])


def test_function_that_is_missing_is_refused(module: ModuleType) -> None:
    optimizer = new()
    del module.adamw
    with pytest.raises(UnsupportedOptimizerError, match="has no function adamw"):
        swap_optimizer(optimizer, device=CpuAsDevice())
    assert type(optimizer) is AdamW


@pytest.mark.parametrize(
    "signature",
    [
        "params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, amsgrad, beta1, "
        "beta2, lr, weight_decay, eps, maximize",
        "params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, step, *, amsgrad, beta1, beta2, "
        "lr, weight_decay, eps, maximize, capturable=False",
        "*args, **kwargs",
    ],
    ids=["renamed", "one-more", "anything"],
)
def test_function_with_another_signature_is_refused(module: ModuleType, signature: str) -> None:
    optimizer = new()
    scope: dict[str, Any] = {}
    exec(f"def adamw({signature}): pass", scope)
    module.adamw = scope["adamw"]
    with pytest.raises(UnsupportedOptimizerError, match=r"takes .* known is ") as caught:
        swap_optimizer(optimizer, device=CpuAsDevice())
    first = signature.split(",")[0].strip("*")
    assert first in str(caught.value)
    assert type(optimizer) is AdamW


def test_subclass_is_refused() -> None:
    class Mine(AdamW):
        pass

    with pytest.raises(UnsupportedOptimizerError, match=f"Supported: .*{NAME}.AdamW"):
        swap_optimizer(Mine([torch.nn.Parameter(torch.ones(4))]), device=CpuAsDevice())


def test_torch_is_not_mistaken_for_it() -> None:
    """Same class name, other module."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4000))])
    assert not TorchHyperAdamWAdapter.matches(optimizer)
    swap_optimizer(optimizer, device=CpuAsDevice())
    assert is_swap_optimizer(optimizer)
    assert optimizer.swap_report().optimizer == "torch.optim.AdamW"


def test_comparison_would_notice_a_group_counter(twins: Callable[..., Any]) -> None:
    pair = twins([(4,)], AdamW)
    pair.native.param_groups[0]["step"] = 1
    assert [d.what for d in differences(pair.native, pair.swapped)] == ["step of group 0"]
