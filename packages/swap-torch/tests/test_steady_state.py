# SPDX-License-Identifier: Apache-2.0
"""After warm-up a step copies and does nothing else: it allocates, binds and plans nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from swap_testkit.torch import CpuAsDevice, TorchRecordingDevice
from swap_torch import SwapOptimizerConfig as Config
from swap_torch import swap_optimizer

SHAPES = [(33, 17), (1024,), (3,), (300, 7), (2049,), (64, 64), (128,)]
COUNT = len(SHAPES)
SWAP_TIMES = [1, 3, COUNT, 10 * COUNT]


class Swapped:
    """A swapped optimizer after its warm-up, and what it did since it was last asked."""

    def __init__(self, packed: bool, swap_times: int, *, masks: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES
        ]
        self.gradients = [torch.full_like(param, 0.25) for param in self.params]
        self.inner = CpuAsDevice()
        self.device = TorchRecordingDevice(self.inner)
        config = Config(swap_times=swap_times, min_numel=0, packed_swap=packed)
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.1}]
        self.optimizer: Any = swap_optimizer(torch.optim.AdamW(groups), config, device=self.device)
        self.packed, self.masks, self.steps = packed, masks, 0
        for _ in range(masks):
            self.step()
        self.ledger = self.optimizer.swap_report().ledger
        self.device.log.clear()

    def step(self) -> None:
        """One step. With several masks, each leaves another parameter without gradient."""
        for index, (param, gradient) in enumerate(zip(self.params, self.gradients, strict=True)):
            skipped = self.masks > 1 and index == self.steps % self.masks
            param.grad = None if skipped else gradient
        self.optimizer.step()
        self.steps += 1

    def growth(self) -> dict[str, int]:
        """How much each counter grew since the last call."""
        before, self.ledger = self.ledger, self.optimizer.swap_report().ledger
        return {name: value - asdict(before)[name] for name, value in asdict(self.ledger).items()}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("swap_times", SWAP_TIMES)
def test_a_step_copies_and_nothing_else(packed: bool, swap_times: int) -> None:
    swapped = Swapped(packed, swap_times)
    batches = min(swap_times, COUNT)
    report = swapped.optimizer.swap_report()
    assert report.batches == batches
    copies = batches if packed else 2 * COUNT
    for _ in range(5):
        swapped.device.log.clear()
        swapped.step()
        # One call of a copy verb per batch and direction; packed, that is one copy.
        assert len(swapped.device.ops("copy_in")) == batches
        assert len(swapped.device.ops("copy_out")) == batches
        assert swapped.growth() == {
            "updates": 1,
            "copies_in": copies,
            "copies_out": copies,
            "bytes_loaded": sum(report.batch_bytes),
            "bytes_stored": sum(report.batch_bytes),
            "restores": min(2, batches) if packed else batches,
            "plans_built": 0,
            "views_made": 0,
            "host_allocations": 0,
            "host_bytes": 0,
            "device_bytes": 0,
            "peak_device_bytes": 0,
        }


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("swap_times", SWAP_TIMES)
def test_host_tensors_are_the_same_objects_at_the_same_addresses(
    packed: bool, swap_times: int
) -> None:
    swapped = Swapped(packed, swap_times)

    def tensors() -> list[tuple[int, int]]:
        entries = swapped.optimizer.state.values()
        return [(id(t), t.data_ptr()) for entry in entries for t in entry.values()]

    before = tensors()
    assert len({address for _, address in before}) == 3 * COUNT
    for _ in range(5):
        swapped.step()
        assert tensors() == before


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("masks", [1, 4])
def test_nothing_new_is_kept(packed: bool, masks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = Swapped(packed, 3, masks=masks)
    events: list[int] = []
    create_event = swapped.device.create_event
    monkeypatch.setattr(swapped.device, "create_event", lambda: events.append(1) or create_event())

    def kept() -> list[int]:
        swapped.device.log.clear()
        gc.collect()
        kinds = [type(obj) for obj in gc.get_objects()]
        tensors = sum(issubclass(kind, torch.Tensor) for kind in kinds)
        return [tensors, len(kinds)]

    gc.collect()
    gc.freeze()  # what exists already takes no time to look at
    try:
        swapped.step()
        before = kept()
        for _ in range(20):
            swapped.step()
        after = kept()
    finally:
        gc.unfreeze()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 5  # no growth with the number of steps
    assert not events


@pytest.mark.parametrize("packed", [True, False])
def test_plans_of_returning_masks_are_kept(packed: bool) -> None:
    swapped = Swapped(packed, 3, masks=4)
    for _ in range(12):
        swapped.step()
    growth = swapped.growth()
    assert growth["updates"] == 12
    assert growth["plans_built"] == growth["views_made"] == growth["host_allocations"] == 0


@pytest.mark.parametrize("packed", [True, False])
def test_more_masks_than_plans_are_kept_stay_right(
    packed: bool, twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    config = Config(swap_times=4, min_numel=0, packed_swap=packed)
    pair = twins([(30 + i,) for i in range(12)], config=config)
    train(pair, 30, lambda step, position: position != step % 12)
    assert pair.swapped.swap_report().ledger.plans_built == 30
    held = len(pair.swapped._swap._plans)
    assert held < 12


@pytest.mark.parametrize("packed", [True, False])
def test_reading_and_changing_hyperparameters_plan_nothing(packed: bool) -> None:
    swapped = Swapped(packed, 3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(swapped.optimizer, lambda epoch: 0.9**epoch)
    for _ in range(3):
        swapped.step()
        scheduler.step()
        swapped.optimizer.param_groups[1]["weight_decay"] += 0.1
        swapped.optimizer.state_dict()
        for entry in swapped.optimizer.state.values():
            entry["exp_avg"].mul_(0.5)
    growth = swapped.growth()
    assert growth["plans_built"] == growth["views_made"] == growth["host_allocations"] == 0


@pytest.mark.parametrize("packed", [True, False])
def test_a_step_without_gradients_touches_no_device(packed: bool) -> None:
    swapped = Swapped(packed, 3)
    swapped.optimizer.zero_grad()
    swapped.optimizer.step()
    assert swapped.device.log == []
    assert not any(swapped.growth().values())
