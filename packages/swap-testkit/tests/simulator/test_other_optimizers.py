# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose own step runs on each batch, where device and host memory really differ."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import optim

from swap_core import align
from swap_testkit.torch import assert_same_bits, simulator
from swap_testkit.torch.simulator import Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"
MATRICES = [(5, 7), (40, 9), (12, 12), (30, 4), (16, 33)]
KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd, for-loop": (optim.SGD, {"momentum": 0.9, "foreach": False}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adamax": (optim.Adamax, {}),
    "adadelta": (optim.Adadelta, {}),
    "asgd": (optim.ASGD, {}),
    "rprop": (optim.Rprop, {}),
    "adafactor": (optim.Adafactor, {}),
    "muon": (torch.optim.Muon, {}),
}


class Twins:
    """A native optimizer and its swapped twin on the simulated accelerator."""

    def __init__(
        self,
        kind: str,
        *,
        packed: bool = True,
        before: int = 0,
        shapes: Any = MATRICES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.native, self.swapped = (make(kind, shapes, dtype) for _ in range(2))
        self.steps = 0
        for _ in range(before):
            self.step()
        config = SwapOptimizerConfig(swap_times=99, min_numel=4, packed_swap=packed)
        swap_optimizer(self.swapped, config)

    def give_gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        for p, q in zip(parameters(self.native), parameters(self.swapped), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype)
            q.grad = p.grad.clone()

    def step(self) -> None:
        """Update both; nobody waits, and nothing is read."""
        self.give_gradients()
        self.native.step()
        self.swapped.step()


def make(kind: str, shapes: Any, dtype: torch.dtype = torch.float32) -> optim.Optimizer:
    optimizer_class, options = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
        for shape in shapes
    ]
    return optimizer_class(params, lr=0.01, **options)  # type: ignore[call-arg]


def parameters(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = optimizer.param_groups[0]["params"]
    return found


def devices_of_what_stays(twins: Twins, optimizer: optim.Optimizer) -> dict[str, str]:
    """Of the states that do not swap, of the first parameter."""
    report = twins.swapped.swap_report()  # type: ignore[attr-defined]
    swapping = {state.key for state in report.states if state.stays is None}
    entry = optimizer.state[parameters(optimizer)[0]]
    return {key: value.device.type for key, value in entry.items() if key not in swapping}


@pytest.mark.parametrize("schedule", [Schedule.LATEST, Schedule.SIDE_STREAMS_FIRST])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_equal_and_no_races(kind: str, schedule: Schedule) -> None:
    simulator.set_schedule(schedule, seed=3)
    for packed in (True, False):
        for before in (0, 1):
            twins = Twins(kind, packed=packed, before=before)
            with simulator.strict_free():
                for _ in range(3):
                    twins.step()
                assert_same_bits(twins.native, twins.swapped)
    assert simulator.races() == []


def test_states_are_never_all_on_the_device_from_the_first_step_on() -> None:
    shapes = [(16, 16)] * 8
    twins = Twins("sgd, for-loop", shapes=shapes)
    size = align(4 * 16 * 16)
    peaks = []
    for _ in range(3):
        twins.give_gradients()
        torch.accelerator.synchronize()
        idle = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        twins.swapped.step()
        peaks.append(torch.accelerator.max_memory_allocated() - idle)
        assert torch.accelerator.memory_allocated() == idle
        twins.native.step()
    # Two arenas of one state each; and in the first step a state as the optimizer makes it.
    assert peaks == [3 * size, 2 * size, 2 * size]


@pytest.mark.parametrize("map_location", ["cpu", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_is_where_native_has_it(
    kind: str, dtype: torch.dtype, map_location: str | None
) -> None:
    """Also when it was loaded, cast as natively, and after a phase on the host."""
    twins = Twins(kind, dtype=dtype)
    twins.step()
    file = io.BytesIO()
    torch.save(twins.native.state_dict(), file)

    def check(when: str) -> None:
        assert_same_bits(twins.native, twins.swapped)
        native, swapped = (
            devices_of_what_stays(twins, each) for each in (twins.native, twins.swapped)
        )
        assert native == swapped, when

    check("made")
    for optimizer in (twins.native, twins.swapped):
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, map_location=map_location))
    check("loaded")
    twins.step()
    check("loaded and updated")
    twins.swapped.offload()  # type: ignore[attr-defined]
    twins.step()
    check("offloaded and updated")
    assert simulator.races() == []
