# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded trainings with Muon and with SGD: native and swapped, each into each.

Saved on four processes and loaded on two. Muon's update communicates, and its results depend on how
matrices are cut; so what is compared are trainings on the same number of processes.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from swap_testkit.torch import CopySchedule, CpuAsDevice, launch
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.scenarios import SCENARIOS
from swap_torch import SwapOptimizerConfig, swap_optimizer

KINDS = ["native", "swapped"]
TRAININGS = {
    "muon": ("muon-fsdp-uneven", partial(torch.optim.AdamW, lr=0.01)),
    "sgd": ("fsdp-uneven", partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
}
"""A scenario, and the optimizer of what Muon does not update."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# torch's own, about its own DTensors; and a process all of whose matrices are too small to swap.
QUIET = [
    "While redistributing from",
    "FSDP2-wrapped module .* returned a view",
    "TypedStorage is deprecated",  # torch 2.10, of its own writer
    "swap_optimizer: none of the 12 states of this torch.optim.Muon can swap",
]


class Run:
    """A scenario in training, native or swapped."""

    def __init__(self, training: str, kind: str) -> None:
        scenario, make = TRAININGS[training]
        place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        self.trainer: Any = SCENARIOS[scenario].build(place, make)
        self.model = self.trainer.model
        self.optimizers = self.trainer.optimizers
        self.device = CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
        if kind == "swapped":
            for optimizer in self.optimizers:
                # Of some matrices, what one process has is too small to swap.
                config = SwapOptimizerConfig(min_numel=13, swap_times=3)
                swap_optimizer(optimizer, config, device=self.device)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train_step(self.steps)
            self.steps += 1
            assert self.device.held_bytes == 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizers = get_state_dict(self.model, self.optimizers, options=FLAT)
        return {"model": model, "optimizers": optimizers}

    def load(self, path: Path) -> None:
        state_dict = self.state_dict()
        dcp.load(state_dict, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizers"],
            options=FLAT,
        )

    def digest(self) -> str:
        """Everything, with the values of all processes."""
        found = hashlib.sha256()
        for part, entries in sorted(self.state_dict().items()):
            for name, value in sorted(entries.items()):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                content = whole.numpy().tobytes() if isinstance(whole, torch.Tensor) else whole
                found.update(repr((part, name, content)).encode())
        return found.hexdigest()


def quietly() -> None:
    warnings.simplefilter("error")
    for text in QUIET:
        warnings.filterwarnings("ignore", message=f".*{text}")


def job_save(training: str, folder: str) -> list[str]:
    """Train, save, train on; digests of what was saved, and of the end."""
    quietly()
    found = []
    for kind in KINDS:
        run = Run(training, kind)
        run.train(2)
        dcp.save(run.state_dict(), checkpoint_id=Path(folder, kind))
        dist.barrier()
        saved = run.digest()
        run.train(1)
        found.append(f"{saved} {run.digest()}")
    return found


def job_load(training: str, folder: str) -> dict[str, str]:
    """Load each file into each kind, and train on."""
    quietly()
    found = {}
    for source in KINDS:
        for kind in KINDS:
            run = Run(training, kind)
            run.load(Path(folder, source))
            loaded = run.digest()
            run.train(2)
            found[f"{source} into {kind}"] = f"{loaded} {run.digest()}"
    return found


@pytest.mark.parametrize("training", TRAININGS)
def test_files_of_four_processes_into_two(training: str, tmp_path: Path) -> None:
    by_rank = launch(job_save, training, str(tmp_path), nproc=4, timeout=200)
    assert len({digest for digests in by_rank for digest in digests}) == 1
    saved = by_rank[0][0].partition(" ")[0]
    by_rank_loaded = launch(job_load, training, str(tmp_path), nproc=2, timeout=200)
    ends = {end for digests in by_rank_loaded for end in digests.values()}
    assert len(ends) == 1, by_rank_loaded
    assert ends.pop().startswith(saved)


# The order of collectives where processes differ in what they swap.


def job_placements(foreach: bool) -> list[str]:
    """NAdam on gradients that are reduced in the update, several times.

    By its own sizes one process would cut before each of the last three parameters, and the other
    only before the first of them: of the large one it has nothing.
    """
    quietly()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = [(310, 2), (310, 2), (1, 2000), (310, 2), (310, 2), (310, 2), (2, 2)]
    found = []
    for kind in KINDS:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        params = [
            torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values
        ]
        optimizer = torch.optim.NAdam(params, lr=0.1, foreach=foreach)
        device = CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
        if kind == "swapped":
            config = SwapOptimizerConfig(min_numel=10, swap_times=3)
            swap_optimizer(optimizer, config, device=device)
        for _ in range(3):
            for param, shape in zip(params, shapes, strict=True):
                part = torch.randn(shape, generator=generator) / (1 + dist.get_rank())
                placed = [Partial()] if shape[0] >= dist.get_world_size() else [Shard(0)]
                param.grad = (
                    DTensor.from_local(part, mesh, placed, run_check=False)
                    if placed == [Partial()]
                    else distribute_tensor(part, mesh, placed)
                )
            optimizer.step()
            assert device.held_bytes == 0
        entries = optimizer.state.values()
        states = [entry[key] for entry in entries for key in ("exp_avg", "exp_avg_sq")]
        text = repr([(t.placements, t.to_local().tolist()) for t in (*params, *states)])
        found.append(hashlib.sha256(text.encode()).hexdigest())
    return found


@pytest.mark.parametrize("foreach", [False, True])
def test_processes_that_swap_different_states_still_communicate_in_one_order(
    foreach: bool,
) -> None:
    for native, swapped in launch(job_placements, foreach, nproc=2, timeout=60):
        assert native == swapped


def job_budgets() -> list[str]:
    """Parameters that are sharded and some that are not, and a budget for these in one process.

    With foreach, torch sums up the gradients of a whole list at once.
    """
    quietly()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for kind in KINDS:
        generator = torch.Generator().manual_seed(0)
        plain = [torch.nn.Parameter(torch.randn(600, generator=generator)) for _ in range(3)]
        values = [torch.randn(300, 2, generator=generator) for _ in range(6)]
        sharded = [
            torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values
        ]
        groups = [{"params": plain}, {"params": sharded}]
        optimizer = torch.optim.NAdam(groups, lr=0.1, foreach=True)
        if kind == "swapped":
            budget = 3 * 2 * 600 * 4 * dist.get_rank()
            config = SwapOptimizerConfig(min_numel=10, swap_times=4, device_budget=budget)
            swap_optimizer(optimizer, config, device=CpuAsDevice(poison=True))
        for _ in range(3):
            for param in plain:
                param.grad = torch.randn(600, generator=generator)
            for param in sharded:
                part = torch.randn(300, 2, generator=generator) / (1 + dist.get_rank())
                param.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
            optimizer.step()
        text = repr([p.tolist() for p in plain] + [p.to_local().tolist() for p in sharded])
        found.append(hashlib.sha256(text.encode()).hexdigest())
    return found


def test_processes_with_different_budgets_still_make_the_same_calls() -> None:
    for native, swapped in launch(job_budgets, nproc=2, timeout=60):
        assert native == swapped
