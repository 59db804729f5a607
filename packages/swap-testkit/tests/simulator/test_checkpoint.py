# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint where states are on the host and parameters on a device."""

from __future__ import annotations

import copy
import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from swap_testkit.torch import launch, same_bits, simulator
from swap_testkit.torch.model import ModelShape, Transformer, unit_initialised
from swap_testkit.torch.parallel import Parallel, Place, parallelize
from swap_testkit.torch.scenarios.base import LmTrainer
from swap_testkit.torch.simulator import Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer

KINDS = ["native", "swapped"]
MIN_NUMEL = 40
# torch's own, about its own DTensors.
QUIET = [
    "While redistributing from",
    "FSDP2-wrapped module .* returned a view",
    "TypedStorage is deprecated",  # torch 2.10, of its own writer
]


class Run:
    """A small language model under FSDP2 on simulated devices, native or swapped."""

    def __init__(self, kind: str, steps: int = 0) -> None:
        rank = dist.get_rank()
        place = Place(rank, dist.get_world_size(), torch.device("simnpu", rank))
        self.model = unit_initialised(Transformer(ModelShape(layers=1)), seed=1).to(place.device)
        parallelize(self.model, Parallel.FSDP, place)

        def make(params: Any) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(params, lr=0.01, fused=True)
            if kind == "native":
                return made
            return swap_optimizer(made, SwapOptimizerConfig(min_numel=MIN_NUMEL, swap_times=4))

        self.trainer = LmTrainer(self.model, make, place, stream=rank)
        self.optimizer = self.trainer.optimizers[0]
        self.steps = 0
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train_step(self.steps)
            self.steps += 1

    def digest(self) -> str:
        """Parameters and states of this rank."""
        found = hashlib.sha256()
        for param in self.model.parameters():
            for tensor in (param.detach(), *self.optimizer.state[param].values()):
                found.update(local(tensor).cpu().numpy().tobytes())
        return found.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def prepare(schedule: str) -> None:
    warnings.simplefilter("error")
    for text in QUIET:
        warnings.filterwarnings("ignore", message=f".*{text}")
    simulator.set_schedule(Schedule[schedule], seed=5)


def job_save(schedule: str, folder: str) -> dict[str, str]:
    """Save what there was after two steps, in three ways; the digests then and two steps later."""
    prepare(schedule)
    found = {}
    for kind in KINDS:
        run = Run(kind, steps=2)
        found[f"{kind} saved"] = run.digest()
        before = torch.accelerator.memory_allocated()
        model, optimizer = get_state_dict(run.model, run.optimizer)
        if kind == "swapped":
            assert torch.accelerator.memory_allocated() == before
            assert_states_are_on_the_host(optimizer)
            assert_states_can_be_used(run.optimizer)
        content = {"model": model, "optimizer": optimizer}
        dcp.save(content, checkpoint_id=Path(folder, kind))
        save_through_pinned_memory(content, Path(folder, f"{kind}-pinned"))
        saving = dcp.async_save(content, checkpoint_id=Path(folder, f"{kind}-async"))
        run.train(2)  # while it is being written
        saving.result()
        found[f"{kind} trained"] = run.digest()
    assert simulator.races() == []
    return found


def save_through_pinned_memory(content: dict[str, Any], path: Path) -> None:
    before = simulator.pinned_bytes()
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    saving = dcp.async_save(content, checkpoint_id=path, async_stager=stager)
    assert simulator.pinned_bytes() > before
    saving.result()


def assert_states_are_on_the_host(optimizer: dict[str, Any]) -> None:
    tensors = [local(value) for entry in optimizer["state"].values() for value in entry.values()]
    assert len(tensors) > 0
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def assert_states_can_be_used(optimizer: torch.optim.Optimizer) -> None:
    """Whatever user code does with states between updates: a DTensor of host memory is whole."""
    for entry in optimizer.state.values():
        for value in entry.values():
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            for other in (
                value.detach(),
                value.clone(),
                copy.deepcopy(value),
                value + 0,
                torch.load(file, weights_only=False),
            ):
                assert same_bits(local(other), local(value))


def job_load(schedule: str, folder: str) -> dict[str, list[str]]:
    """Load each file into each kind; the digests then and two steps later."""
    prepare(schedule)
    found: dict[str, list[str]] = {"saved": [], "trained": []}
    for path in sorted(Path(folder).iterdir()):
        for kind in KINDS:
            run = Run(kind)
            model, optimizer = get_state_dict(run.model, run.optimizer)
            content = {"model": model, "optimizer": optimizer}
            dcp.load(content, checkpoint_id=path)
            set_state_dict(
                run.model,
                run.optimizer,
                model_state_dict=content["model"],
                optim_state_dict=content["optimizer"],
                options=StateDictOptions(),
            )
            run.steps = 2
            found["saved"].append(run.digest())
            run.train(2)
            found["trained"].append(run.digest())
    assert simulator.races() == []
    return found


@pytest.mark.parametrize("schedule", ["EARLIEST", "LATEST", "RANDOM"])
def test_files_there_and_back(schedule: str, tmp_path: Path) -> None:
    """Native and swapped, saved at once and while training goes on, each into each."""
    saved = launch(job_save, schedule, str(tmp_path), nproc=2, timeout=180, device="sim")
    loaded = launch(job_load, schedule, str(tmp_path), nproc=2, timeout=180, device="sim")
    for mine, theirs in zip(saved, loaded, strict=True):
        for when in ("saved", "trained"):
            assert mine[f"native {when}"] == mine[f"swapped {when}"]
            assert theirs[when] == [mine[f"native {when}"]] * 6 * len(KINDS)
