# SPDX-License-Identifier: Apache-2.0
"""``dcp.async_save`` while training goes on, and several optimizers in one process.

Ranks run ``job_*`` functions; the type of device is an argument.
"""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from swap_testkit.torch import CopySchedule, CpuAsDevice, launch, same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "cpu"


class Stages:
    """Stages of a pipeline on this rank, each with an optimizer of its own, native or swapped."""

    def __init__(self, kind: str, device: str, *, first: int = 0, count: int = 1) -> None:
        torch.manual_seed(first)
        self.parts = [
            nn.ModuleDict(
                {f"layer{first + i}": nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))}
            )
            for i in range(count)
        ]
        self.device = CpuAsDevice(schedule=CopySchedule.LATEST) if device == "cpu" else None
        self.optimizers = []
        self.kind = kind
        self.steps = 0
        for part in self.parts:
            part.to(device)

    def shard(self) -> Stages:
        for part in self.parts:
            for layer in part.values():
                fully_shard(layer)
        return self

    def optimize(self) -> Stages:
        for part in self.parts:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
            if self.kind == "swapped":
                config = SwapOptimizerConfig(min_numel=25, swap_times=3)
                swap_optimizer(optimizer, config, device=self.device)
            self.optimizers.append(optimizer)
        return self

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            for optimizer in self.optimizers:
                for number, param in enumerate(optimizer.param_groups[0]["params"]):
                    param.grad = param.detach() * (0.1 * self.steps + number)
                optimizer.step()

    # As torchtitan's OptimizersContainer: one flat state dict of all.

    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value
            for part, optimizer in zip(self.parts, self.optimizers, strict=True)
            for key, value in get_optimizer_state_dict(part, optimizer, options=self.flat).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=self.flat)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(found[key], value), key
        else:
            assert found[key] == value, key


# Asynchronous savers.


def job_async(device: str, how: str, folder: str) -> None:
    """Save, train while it is written, and load what was written."""
    # The saver's process imports torch without numpy's help; torch warns of what it will drop.
    warnings.simplefilter("default")
    # Ranks are daemons, which may not start processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    stages = Stages("swapped", device).shard().optimize()
    stages.train(2)
    expected = copy.deepcopy(stages.state_dict())
    options: dict[str, Any] = {
        "default": {},
        "blocking": {"async_stager": BlockingAsyncStager()},
        "staged in a thread": {
            "async_stager": DefaultStager(StagingOptions(False, False, True, False))
        },
        "shared memory": {"async_stager": DefaultStager(StagingOptions(False, True, False, False))},
        "pinned": {"async_stager": BlockingAsyncStager(cache_staged_state_dict=True)},
        "process": {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
    }[how]
    path = Path(folder, "first")
    saving = dcp.async_save({"optimizer": stages}, checkpoint_id=path, **options)
    stages.train(3)
    future = saving if how != "staged in a thread" else saving.upload_completion
    future.result(timeout=100)
    fresh = Stages("swapped", device).shard().optimize()
    dcp.load({"optimizer": fresh}, checkpoint_id=path)
    assert_equal(fresh.state_dict(), expected)
    assert fresh.device is None or fresh.device.held_bytes == 0
    # The optimizer that was saved went on as one that was not.
    native = Stages("native", device).shard().optimize()
    native.train(5)
    assert_equal(stages.state_dict(), native.state_dict())


WAYS = [
    "default",
    "blocking",
    "staged in a thread",
    "shared memory",
    "process",
    pytest.param(
        "pinned",
        marks=[
            pytest.mark.hardware,
            pytest.mark.skipif(DEVICE == "cpu", reason="memory is pinned for accelerators"),
        ],
    ),
]


@pytest.mark.parametrize("how", WAYS)
def test_async_save(how: str, tmp_path: Path) -> None:
    nproc = 1 if how == "process" else 2  # a saver's process imports torch for each rank
    launch(job_async, DEVICE, how, str(tmp_path), nproc=nproc, timeout=120)


# Several optimizers.


def job_stages(device: str, folder: str) -> None:
    """Two ranks with two stages each; each kind loads what the other saved."""
    warnings.simplefilter("error")
    # torch 2.10, of its own writer.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    first = 2 * dist.get_rank()
    saved = {}
    for kind in ("native", "swapped"):
        stages = Stages(kind, device, first=first, count=2).optimize()
        stages.train(2)
        dcp.save({"optimizer": stages}, checkpoint_id=Path(folder, kind))
        saved[kind] = copy.deepcopy(stages.state_dict())
    assert_equal(saved["swapped"], saved["native"])
    later = []
    for written in ("native", "swapped"):
        for kind in ("native", "swapped"):
            stages = Stages(kind, device, first=first, count=2).optimize()
            dcp.load({"optimizer": stages}, checkpoint_id=Path(folder, written))
            assert_equal(stages.state_dict(), saved["native"])
            stages.train(2)
            later.append(stages.state_dict())
    for state_dict in later[1:]:
        assert_equal(state_dict, later[0])


def job_all_stages(device: str, folder: str) -> None:
    """One rank with all stages loads what two ranks saved."""
    for written in ("native", "swapped"):
        stages = Stages("swapped", device, first=0, count=4).optimize()
        dcp.load({"optimizer": stages}, checkpoint_id=Path(folder, written))
        steps = {float(value) for key, value in stages.state_dict().items() if ".step" in key}
        assert steps == {2.0}


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    launch(job_stages, DEVICE, str(tmp_path), nproc=2)
    launch(job_all_stages, DEVICE, str(tmp_path), nproc=1)
