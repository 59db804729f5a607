# SPDX-License-Identifier: Apache-2.0
"""Every learning rate scheduler drives a swapped optimizer as it does a native one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from swap_torch import SwapOptimizerConfig

SHAPES = [(3, 50), (), (40,), (7, 2)]
CONFIG = SwapOptimizerConfig(min_numel=8, swap_times=3)
STEPS = 6


def sequential(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=4)]
    return SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: Optimizer) -> ChainedScheduler:
    return ChainedScheduler([ConstantLR(optimizer, 0.5, 3), ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "ChainedScheduler": chained,
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum=True),
    "LambdaLR": lambda o: LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda epoch: 0.7),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=3 * STEPS),
    "PolynomialLR": lambda o: PolynomialLR(o, total_iters=20, power=2.0),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "SequentialLR": sequential,
    "StepLR": lambda o: StepLR(o, step_size=2, gamma=0.3),
}
MOVES_BETAS = {"CyclicLR", "OneCycleLR"}


def train(pair: Any, schedulers: list[Any], steps: int) -> list[tuple[float, Any]]:
    """Train both; what the groups said in each step."""
    seen = []
    for step in range(steps):
        pair.give_gradients()
        pair.native.step()
        pair.swapped.step()
        pair.check()  # options too
        for scheduler in schedulers:
            metric = (1.0 + step,) if isinstance(scheduler, ReduceLROnPlateau) else ()
            scheduler.step(*metric)
        group = pair.swapped.param_groups[0]
        seen.append((float(group["lr"]), tuple(map(float, group["betas"]))))
        pair.check()
    return seen


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_also_after_loading(
    twins: Callable[..., Any], name: str, tensor_lr: bool, when: str
) -> None:
    """Made before or after wrapping; still in charge after both of them were loaded."""
    made: list[Any] = []

    def attach(optimizer: Optimizer) -> None:
        made.append(SCHEDULERS[name](optimizer))

    def pair_of() -> tuple[Any, list[Any]]:
        made.clear()
        lr = torch.tensor(0.01) if tensor_lr else 0.01
        pair = twins(SHAPES, config=CONFIG, prepare=attach if when == "before" else None, lr=lr)
        if when == "after":
            attach(pair.native)
            attach(pair.swapped)
        return pair, list(made)

    pair, schedulers = pair_of()
    seen = train(pair, schedulers, STEPS)
    assert len({lr for lr, _ in seen}) > 2
    assert (len({betas for _, betas in seen}) > 2) == (name in MOVES_BETAS)
    other, others = pair_of()
    for (p, q), (r, s) in zip(pair.pairs(), other.pairs(), strict=True):
        r.data.copy_(p)
        s.data.copy_(q)
    # Each gets what the other kind saved.
    other.native.load_state_dict(copy.deepcopy(pair.swapped.state_dict()))
    other.swapped.load_state_dict(pair.native.state_dict())
    for scheduler, source in zip(others, schedulers[::-1], strict=True):
        scheduler.load_state_dict(copy.deepcopy(source.state_dict()))
    other.steps = pair.steps
    assert train(other, others, STEPS) == train(pair, schedulers, STEPS)
    other.check()


def test_averaged_models() -> None:
    """SWA: an averaged model, its own learning rate, batch norm statistics at the end."""
    from swap_testkit.torch import CpuAsDevice, same_bits
    from swap_torch import swap_optimizer

    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = CosineAnnealingLR(optimizer, T_max=10)
        if swap:
            swap_optimizer(optimizer, CONFIG, device=CpuAsDevice(poison=True))
        averaged = AveragedModel(model)
        swa = SWALR(optimizer, swa_lr=0.05)
        batches = [torch.randn(8, 10) for _ in range(4)]
        for epoch in range(4):
            for batch in batches:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            if epoch >= 2:
                averaged.update_parameters(model)
                swa.step()
            else:
                scheduler.step()
        update_bn(batches, averaged)
        results.append([*averaged.state_dict().values(), *model.state_dict().values()])
    for native, swapped in zip(*results, strict=True):
        assert same_bits(native, swapped)
