# SPDX-License-Identifier: Apache-2.0
"""What trainers and users do around an optimizer, natively and swapped, bit for bit.

More of it is in ``test_changing_tools.py`` (hooks, closures, scalers), ``test_changing_sets.py``
(frozen and replaced parameters) and ``test_changing_states.py`` (edited states).
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits, same_bits
from swap_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer

SHAPES = [(3, 50), (), (40,), (7, 2), (200,)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])


def config(packed: bool = True, **options: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(min_numel=8, swap_times=3, packed_swap=packed, **options)


class Model(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 30), nn.Linear(30, 10)
        self.norm = nn.LayerNorm(30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x).relu()))  # type: ignore[no-any-return]


class Trainings:
    """The same training, natively and swapped."""

    def __init__(self, packed: bool = True, **options: Any) -> None:
        self.device = CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
        self.models, self.optimizers = [], []
        for swap in (False, True):
            torch.manual_seed(0)
            model = Model()
            optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
            if swap:
                swap_optimizer(optimizer, config(packed), device=self.device)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def each(self, act: Callable[[nn.Module, Optimizer, int], Any], number: int) -> None:
        """Do something with both; they must agree after it."""
        results = [
            act(model, optimizer, number)
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        self.check()
        if isinstance(results[0], torch.Tensor):
            assert same_bits(*results)

    def check(self) -> None:
        assert_same_bits(*self.optimizers)
        assert self.device.held_bytes == 0


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(number))


def loss_of(model: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
    x = batch(number)
    return (model(x) - x).square().mean()


@BOTH
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", ["norm", "value", None])
def test_accumulation_and_clipping(packed: bool, clip: str | None, accumulate: int) -> None:
    trainings = Trainings(packed)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        losses = [loss_of(model, 10 * number + part) / accumulate for part in range(accumulate)]
        for loss in losses:
            loss.backward()
        if clip == "norm":
            clip_grad_norm_(model.parameters(), 0.1)
        elif clip == "value":
            clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        return torch.stack(losses).detach()

    for number in range(4):
        trainings.each(step, number)


@BOTH
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for-loop"])
@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "no unscale_"])
@pytest.mark.parametrize("infinite", [(), (1,), (0, 1, 3)], ids=str)
def test_grad_scaler(packed: bool, infinite: tuple[int, ...], unscale: bool, fused: bool) -> None:
    """With and without ``unscale_`` and clipping; steps with inf are skipped."""
    trainings = Trainings(packed, fused=fused)
    scalers = {
        id(optimizer): torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for optimizer in trainings.optimizers
    }

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> torch.Tensor:
        scaler = scalers[id(optimizer)]
        optimizer.zero_grad()
        loss = loss_of(model, number)
        scaler.scale(loss).backward()
        if number in infinite:
            next(model.parameters()).grad.view(-1)[3] = torch.inf  # type: ignore[union-attr]
        if unscale:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for number in range(5):
        trainings.each(step, number)
    native, swapped = scalers.values()
    assert native.state_dict() == swapped.state_dict()
    first = trainings.optimizers[1].param_groups[0]["params"][0]
    steps = trainings.optimizers[1].state[first]["step"]
    assert int(steps) == 5 - len(infinite)


@BOTH
@pytest.mark.parametrize("what", ["model", "step", "both"])
def test_compile(packed: bool, what: str) -> None:
    """A compiled model; a compiled function that calls ``step()``, which then runs uncompiled.

    (Natively a compiled step runs another implementation, which has other bits than the eager one.)
    """
    torch._dynamo.reset()
    trainings = Trainings(packed)
    compiled = [
        torch.compile(model, backend="eager") if what != "step" else model
        for model in trainings.models
    ]
    steps = [optimizer.step for optimizer in trainings.optimizers]
    if what != "model":
        steps[1] = torch.compile(steps[1], backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it cannot compile
        for number in range(4):
            for model, optimizer, step in zip(compiled, trainings.optimizers, steps, strict=True):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                step()
            trainings.check()
    torch._dynamo.reset()


@BOTH
def test_all_kinds_of_hooks_run_once(packed: bool) -> None:
    trainings = Trainings(packed)
    calls: Counter[tuple[str, str]] = Counter()

    def counting(name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *rest: Any) -> None:
            side = "swapped" if is_swap_optimizer(optimizer) else "native"
            calls[side, name] += 1

        return hook

    for optimizer in trainings.optimizers:
        optimizer.register_step_pre_hook(counting("step pre"))
        optimizer.register_step_post_hook(counting("step post"))
        optimizer.register_state_dict_pre_hook(counting("state_dict pre"))
        optimizer.register_state_dict_post_hook(counting("state_dict post"))
        optimizer.register_load_state_dict_pre_hook(counting("load pre"))
        optimizer.register_load_state_dict_post_hook(counting("load post"))

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    for number in range(3):
        trainings.each(step, number)
    assert len(calls) == 12
    assert set(calls.values()) == {3}


# Closures.


@BOTH
def test_a_closure_is_refused_and_allowed(packed: bool) -> None:
    trainings = Trainings(packed)
    evaluated: list[str] = []

    def closure() -> torch.Tensor:
        evaluated.append("once")
        return torch.zeros(())

    before = copy.deepcopy(trainings.models[1].state_dict())
    with pytest.raises(ValueError, match=r"allow_closure=True"):
        trainings.optimizers[1].step(closure)
    assert not evaluated
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.values(), trainings.models[1].state_dict().values(), strict=True)
    )


def evaluate(model: nn.Module, calls: list[int], number: int) -> torch.Tensor:
    calls.append(number)
    model.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    return loss


@BOTH
def test_allowed_closures_train(packed: bool) -> None:
    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        model, device, calls = Model(), CpuAsDevice(poison=True), []
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if swap:
            swap_optimizer(optimizer, config(packed, allow_closure=True), device=device)

        losses = [optimizer.step(partial(evaluate, model, calls, n)) for n in range(4)]
        assert calls == [0, 1, 2, 3]
        results.append([*losses, *model.state_dict().values()])
    for native, swapped in zip(*results, strict=True):
        assert same_bits(native, swapped)


# Parameters, groups and states in users' hands.


@BOTH
def test_freeze_and_unfreeze(packed: bool) -> None:
    trainings = Trainings(packed)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> torch.Tensor:
        model.first.requires_grad_(number not in (2, 3))  # type: ignore[operator, union-attr]
        model.norm.requires_grad_(number > 1)  # type: ignore[operator, union-attr]
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(6):
        trainings.each(step, number)


def edit_options(optimizer: Optimizer, number: int) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = 0.01 * (number + 1)
    group["betas"] = (0.5 + 0.05 * number, 0.9)
    group["weight_decay"] = 0.1 * number
    group["eps"] = 10.0 ** -(number + 3)
    group["maximize"] = number == 2


def move_to_another_group(optimizer: Optimizer, number: int) -> None:
    """Take a parameter out of a group, in place, and add it with other options."""
    if number == 1:
        param = optimizer.param_groups[0]["params"].pop(2)
        optimizer.add_param_group({"params": [param], "lr": 0.2})


def reverse_parameters(optimizer: Optimizer, number: int) -> None:
    optimizer.param_groups[0]["params"].reverse()


@BOTH
@pytest.mark.parametrize("edit", [edit_options, move_to_another_group, reverse_parameters])
def test_groups_edited_in_place(packed: bool, edit: Callable[[Optimizer, int], None]) -> None:
    trainings = Trainings(packed)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> torch.Tensor:
        edit(optimizer, number)
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(5):
        trainings.each(step, number)


def replace(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"] * 3


def zero(state: dict[str, Any]) -> None:
    state["exp_avg"].zero_()


def move(state: dict[str, Any]) -> None:
    """As code that moves states between devices does: other memory under the same object."""
    state["exp_avg"].data = state["exp_avg"].data.clone().mul_(3)


def move_all(state: dict[str, Any]) -> None:
    for key, value in state.items():
        state[key] = value.to("cpu", copy=True)


def share(state: dict[str, Any]) -> None:
    state["exp_avg"].share_memory_()
    state["exp_avg"].mul_(3)


def set_data(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].set_(state["exp_avg_sq"].abs() + 1)


@BOTH
@pytest.mark.parametrize("edit", [replace, zero, move, move_all, share, set_data])
@pytest.mark.parametrize("which", ["one", "all"])
def test_states_changed_between_updates(
    twins: Callable[..., Any],
    train: Callable[..., None],
    which: str,
    edit: Callable[[dict[str, Any]], None],
    packed: bool,
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    for _ in range(2):
        for optimizer in (pair.native, pair.swapped):
            for number, state in enumerate(list(optimizer.state.values())):
                if which == "all" or number == 2:
                    edit(state)
        pair.check()
        train(pair, 2)
    assert pair.device.host_bytes == pair.swapped.swap_report().host_bytes


# Copies.


@BOTH
@pytest.mark.parametrize("how", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_of_model_and_optimizer_train_on(packed: bool, how: Callable[[Any], Any]) -> None:
    trainings = Trainings(packed)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(2):
        trainings.each(step, number)
    trainings.device.schedule = CopySchedule.EARLIEST  # nothing is queued when it is pickled
    copied = Trainings(packed)
    pairs = [how(pair) for pair in zip(trainings.models, trainings.optimizers, strict=True)]
    copied.models, copied.optimizers = map(list, zip(*pairs, strict=True))
    for model, optimizer in pairs:
        params = optimizer.param_groups[0]["params"]
        assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert is_swap_optimizer(copied.optimizers[1])
    for number in range(2, 4):
        copied.each(step, number)
    for number in range(2, 4):
        trainings.each(step, number)
    for one, other in zip(trainings.optimizers, copied.optimizers, strict=True):
        assert_same_bits(one, other)
