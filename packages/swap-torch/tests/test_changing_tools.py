# SPDX-License-Identifier: Apache-2.0
"""What trainers put around an optimizer: schedulers, scalers, hooks, closures, copies."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer

SHAPES = [(3, 5), (), (40,), (7, 2)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])


def config(packed: bool = True, **options: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(min_numel=2, swap_times=3, packed_swap=packed, **options)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6),
}


@BOTH
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(
    twins: Callable[..., Any], name: str, when: str, tensor_lr: bool, packed: bool
) -> None:
    """Made before or after wrapping; no warnings, which would be errors here."""
    made: list[LRScheduler] = []

    def attach(optimizer: Optimizer) -> None:
        made.append(SCHEDULERS[name](optimizer))

    lr = torch.tensor(0.01) if tensor_lr else 0.01
    prepare = attach if when in ("before", "both") else None
    pair = twins(SHAPES, config=config(packed), prepare=prepare, lr=lr)
    if when != "before":
        for optimizer in (pair.native, pair.swapped):
            made.append(LambdaLR(optimizer, lambda epoch: 0.9**epoch))
    learning_rates = set()
    for _ in range(4):
        pair.give_gradients()
        pair.native.step()
        pair.swapped.step()
        pair.check()
        for scheduler in made:
            scheduler.step()
        learning_rates.add(float(pair.swapped.param_groups[0]["lr"]))
    assert len(learning_rates) == 4
    assert int(pair.swapped.state[pair.swapped.param_groups[0]["params"][0]]["step"]) == 4
    assert pair.swapped.swap_report().ledger.updates == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_scheduler_still_warns_when_it_is_stepped_first(
    twins: Callable[..., Any], when: str
) -> None:
    made: list[LRScheduler] = []
    attach = SCHEDULERS["LambdaLR"]
    prepare = (lambda optimizer: made.append(attach(optimizer))) if when == "before" else None
    pair = twins(SHAPES, prepare=prepare)
    scheduler = made[1] if made else attach(pair.swapped)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@BOTH
def test_hyper_parameters_are_read_anew_in_each_step(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    groups = [{"params": SHAPES}, {"params": SHAPES, "lr": torch.tensor(0.1)}]
    pair = twins(groups, config=config(packed), weight_decay=0.1)
    changes: list[dict[str, Any]] = [
        {"lr": 0.5},
        {"betas": (0.5, 0.6)},
        {"weight_decay": 0.0},
        {"weight_decay": 0.7, "eps": 1e-2},
        {"maximize": True},
        {"lr": torch.tensor(0.3)},
        {"decoupled_weight_decay": False},
        {"lr": 0.2, "betas": (0.1, 0.2), "foreach": False},
    ]
    train(pair, 1)
    for change in changes:
        for optimizer in (pair.native, pair.swapped):
            for group in optimizer.param_groups:
                group.update(copy.deepcopy(change))
        train(pair, 1)
        for optimizer in (pair.native, pair.swapped):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
        train(pair, 1)


# Hooks, scalers, closures.


def test_step_hooks_are_called_once(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            calls[f"{'swapped' if is_swap_optimizer(optimizer) else 'native'} {name}"] += 1

        return hook

    def attach(optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(counting("pre, before"))
        optimizer.register_step_post_hook(counting("post, before"))

    handles = [
        register_optimizer_step_pre_hook(counting("global pre")),
        register_optimizer_step_post_hook(counting("global post")),
    ]
    try:
        pair = twins(SHAPES, prepare=attach)
        pair.swapped.register_step_pre_hook(counting("pre, after"))
        pair.swapped.register_step_post_hook(counting("post, after"))
        train(pair, 3)
    finally:
        for handle in handles:
            handle.remove()
    names = ["pre, before", "post, before", "global pre", "global post"]
    swapped = {f"swapped {name}": 3 for name in [*names, "pre, after", "post, after"]}
    assert calls == {**swapped, **{f"native {name}": 3 for name in names}}


def test_step_hook_sees_current_states_and_may_edit_them(twins: Callable[..., Any]) -> None:
    def double(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(2)

    pair = twins(SHAPES, prepare=lambda optimizer: optimizer.register_step_post_hook(double))
    for _ in range(3):
        pair.give_gradients()
        pair.native.step()
        pair.swapped.step()
        pair.check()


@BOTH
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for-loop"])
@pytest.mark.parametrize("infinite_steps", [(1,), (0, 3)])
def test_grad_scaler(
    twins: Callable[..., Any], infinite_steps: tuple[int, ...], fused: bool, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed), fused=fused)
    params = list(pair.pairs())
    sides = [
        (torch.amp.GradScaler("cpu", init_scale=64.0), optimizer, [both[side] for both in params])
        for side, optimizer in enumerate((pair.native, pair.swapped))
    ]
    for step in range(5):
        pair.give_gradients()
        for scaler, optimizer, own in sides:
            scale = float(scaler.scale(torch.ones(())))
            for p in own:
                p.grad.mul_(scale)
            if step in infinite_steps:
                own[3].grad.view(-1)[2] = torch.inf
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        assert not hasattr(pair.swapped, "found_inf")
    assert sides[1][0].get_scale() == 64.0 * 0.5 ** len(infinite_steps)
    first = pair.swapped.param_groups[0]["params"][0]
    assert int(pair.swapped.state[first]["step"]) == 5 - len(infinite_steps)


def test_closure_is_evaluated_once_before_the_first_batch(twins: Callable[..., Any]) -> None:
    pair = twins(SHAPES, config=config(allow_closure=True))
    calls: list[str] = []

    def closure(optimizer: Optimizer) -> Callable[[], torch.Tensor]:
        params = optimizer.param_groups[0]["params"]

        def evaluate() -> torch.Tensor:
            assert torch.is_grad_enabled()
            calls.append(type(optimizer).__name__)
            if optimizer is pair.swapped:
                assert pair.device.held_bytes == 0
                copies.append(pair.device.copies_in)
            optimizer.zero_grad()
            loss = sum((p * p * 3).sum() for p in params)
            loss.backward()
            return loss

        return evaluate

    copies: list[int] = []
    for step in range(3):
        before = pair.device.copies_in
        losses = [o.step(closure(o)) for o in (pair.native, pair.swapped)]
        pair.check()
        assert torch.equal(*losses)
        assert len(calls) == 2 * (step + 1)
        assert copies[-1] == before < pair.device.copies_in
    assert pair.swapped.step() is None


def test_closure_is_refused_by_default(twins: Callable[..., Any]) -> None:
    pair = twins(SHAPES)
    pair.give_gradients()
    before = [q.detach().clone() for _, q in pair.pairs()]
    with pytest.raises(ValueError, match="allow_closure=True"):
        pair.swapped.step(lambda: pytest.fail("evaluated"))
    assert all(torch.equal(q, b) for (_, q), b in zip(pair.pairs(), before, strict=True))
    assert not pair.swapped.state


def test_scheduler_does_not_keep_the_optimizer_alive() -> None:
    """Its wrapper of step() holds the optimizer weakly, also after wrapping."""
    device = CpuAsDevice()
    param = torch.nn.Parameter(torch.ones(40))
    optimizer = AdamW([param])
    wrapped_step = LambdaLR(optimizer, lambda epoch: 1.0).optimizer.step
    swap_optimizer(optimizer, config(), device=device)
    param.grad = torch.ones_like(param)
    optimizer.step()
    step = optimizer.step
    assert device.host_bytes > 0
    assert step is not wrapped_step
    del optimizer, wrapped_step
    gc.collect()
    assert device.host_bytes == 0
    with pytest.raises(ReferenceError, match="optimizer that is gone"):
        step()
