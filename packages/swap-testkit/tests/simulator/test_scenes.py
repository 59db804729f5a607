# SPDX-License-Identifier: Apache-2.0
"""What happens to optimizers besides updates while stores are in flight: nothing is read early."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from swap_testkit.torch import assert_same_bits, simulator
from swap_testkit.torch.simulator import Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"
Scene = Callable[[Any, ModuleType], None]


def both(twins: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return twins.native, twins.swapped


def copied(twins: Any, _: ModuleType) -> None:
    other = copy.deepcopy(twins.swapped)
    twins.step()
    del other
    gc.collect()


def saved(twins: Any, _: ModuleType) -> None:
    file = io.BytesIO()
    torch.save(twins.swapped.state_dict(), file)
    twins.step()
    file.seek(0)
    assert torch.load(file)["state"]


def loaded(twins: Any, _: ModuleType) -> None:
    state_dict = copy.deepcopy(twins.native.state_dict())
    twins.step()
    for optimizer in both(twins):
        optimizer.load_state_dict(copy.deepcopy(state_dict))


def wrapped_late(twins: Any, pipelines: ModuleType) -> None:
    packed = twins.swapped._swap.packed
    twins.native, twins.swapped = (pipelines._optimizer("adamw, foreach") for _ in range(2))
    twins.step()
    config = SwapOptimizerConfig(min_numel=1, swap_times=3, packed_swap=packed)
    swap_optimizer(twins.swapped, config)


def edited_by_the_user(twins: Any, _: ModuleType) -> None:
    for optimizer in both(twins):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)


def replaced_by_the_user(twins: Any, _: ModuleType) -> None:
    for optimizer in both(twins):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to(DEVICE) * 0.5


def emptied(twins: Any, _: ModuleType) -> None:
    for optimizer in both(twins):
        optimizer.state.clear()


def without_some_gradients(twins: Any, pipelines: ModuleType) -> None:
    for step in range(4):
        twins.give_gradients()
        for optimizer in both(twins):
            for position, param in enumerate(pipelines.parameters(optimizer)):
                if (step + position) % 3 == 0:
                    param.grad = None
            optimizer.step()


def with_another_group(twins: Any, _: ModuleType) -> None:
    for optimizer in both(twins):
        added = torch.nn.Parameter(torch.ones(50, device=DEVICE))
        added.grad = torch.ones_like(added)
        optimizer.add_param_group({"params": [added]})
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05


def on_other_streams(twins: Any, _: ModuleType) -> None:
    previous = torch.accelerator.current_stream()
    for _ in range(3):
        stream = torch.Stream(device=DEVICE)
        stream.wait_stream(previous)
        with stream:
            twins.step()
        previous = stream
    torch.accelerator.current_stream().wait_stream(previous)


def asked_for_a_report(twins: Any, _: ModuleType) -> None:
    assert "packed" in str(twins.swapped.swap_report()) or "per tensor" in repr(twins.swapped)


def with_values_that_somebody_holds(twins: Any, _: ModuleType) -> None:
    held = [value for state in twins.swapped.state.values() for value in state.values()]
    twins.step()
    _ = twins.swapped.state
    assert all(bool(value.isfinite().all()) for value in held)


def scaled(twins: Any, pipelines: ModuleType) -> None:
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=8.0) for _ in range(2)]
    for factor in (8.0, float("inf"), 8.0):
        twins.give_gradients()
        for optimizer, scaler in zip(both(twins), scalers, strict=True):
            for param in pipelines.parameters(optimizer):
                param.grad.mul_(factor)
            scaler.scale(torch.ones((), device=DEVICE))
            scaler.step(optimizer)
            scaler.update()


SCENES: list[Scene] = [
    copied,
    saved,
    loaded,
    wrapped_late,
    edited_by_the_user,
    replaced_by_the_user,
    emptied,
    without_some_gradients,
    with_another_group,
    on_other_streams,
    asked_for_a_report,
    with_values_that_somebody_holds,
    scaled,
]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_between_updates(
    pipelines: ModuleType, schedule: Schedule, scene: Scene, packed: bool
) -> None:
    twins = pipelines.Twins("adamw, foreach", packed=packed, swap_times=3)
    with simulator.strict_free():
        twins.step()
        scene(twins, pipelines)
        twins.step()
        twins.check()
    assert simulator.races() == []


def test_an_optimizer_that_goes_while_stores_are_in_flight(
    pipelines: ModuleType, schedule: Schedule
) -> None:
    before = simulator.pinned_bytes()
    with simulator.strict_free():
        for _ in range(3):
            pipelines.Twins().step()
            others = [torch.zeros(3000).pin_memory() for _ in range(4)]
            del others
    torch.accelerator.synchronize()
    assert simulator.pinned_bytes() == before
    assert simulator.races() == []


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_one_optimizer_on_two_devices(schedule: Schedule, packed: bool) -> None:
    optimizers = [
        torch.optim.AdamW(
            [torch.nn.Parameter(torch.ones(64, device=f"{DEVICE}:{i % 2}")) for i in range(6)]
        )
        for _ in range(2)
    ]
    swap_optimizer(
        optimizers[1], SwapOptimizerConfig(min_numel=1, swap_times=4, packed_swap=packed)
    )
    for step in range(3):
        for optimizer in optimizers:
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.full_like(param, step + 1.0)
            optimizer.step()
    assert_same_bits(*optimizers)
    assert simulator.races() == []
