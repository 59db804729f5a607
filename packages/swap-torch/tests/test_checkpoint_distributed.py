# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: its getters and setters, files, and resharding.

Ranks run ``job_*`` functions, on gloo and with CPU tensors in the role of device memory; the type
of device is an argument. A job returns digests as text: those of native and swapped are equal.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from swap_testkit.torch import CopySchedule, CpuAsDevice, launch
from swap_testkit.torch.model import ModelShape, Transformer, unit_initialised
from swap_testkit.torch.parallel import Parallel, Place, parallelize
from swap_testkit.torch.scenarios.base import LmTrainer
from swap_testkit.torch.scenarios.tensor_parallel import shard_tensors
from swap_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer

DEVICE = "cpu"
KINDS = ["native", "swapped"]
FORMS = ["nested", "flat"]
"""Of the state dict: by parameter name and key, or one level."""
LAYOUTS = ["fsdp", "fsdp-tp"]
# torch's own, about its own DTensors.
QUIET = [
    "While redistributing from",
    "FSDP2-wrapped module .* returned a view",
    "TypedStorage is deprecated",  # torch 2.10, of its own writer
]


class Run:
    """A small language model in training, native or swapped, in some layout.

    Args:
        kind: Of :data:`KINDS`.
        layout: Of :data:`LAYOUTS`.
        device: Type of device.
        steps: Steps to begin with.
        optimizer: Options.
    """

    def __init__(
        self, kind: str, layout: str, device: str, *, steps: int = 0, **optimizer: Any
    ) -> None:
        index = 0 if device != "cpu" else None
        self.place = Place(dist.get_rank(), dist.get_world_size(), torch.device(device, index))
        self.device = CpuAsDevice(schedule=CopySchedule.LATEST) if device == "cpu" else None
        model = unit_initialised(Transformer(ModelShape(layers=1)), seed=1).to(self.place.device)
        stream = self.place.rank
        if layout == "fsdp":
            parallelize(model, Parallel.FSDP, self.place)
        else:
            mesh = self.place.mesh(self.place.world // 2, 2, names=("data", "tensor"))
            shard_tensors(model, mesh["tensor"], sequence=True)
            fully_shard(model, mesh=mesh["data"])
            stream //= 2

        def make(params: Any) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(params, **{"lr": 0.01, **optimizer})
            if kind == "native":
                return made
            # Some states stay on the device.
            config = SwapOptimizerConfig(min_numel=40, swap_times=4)
            return swap_optimizer(made, config, device=self.device)

        self.model = model
        self.trainer = LmTrainer(model, make, self.place, stream=stream)
        self.optimizer = self.trainer.optimizers[0]
        assert is_swap_optimizer(self.optimizer) == (kind == "swapped")
        self.steps = 0
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train_step(self.steps)
            self.steps += 1

    def digest(self) -> str:
        """Parameters, states and options of this rank."""
        state = self.optimizer.state
        tensors = [
            value
            for param in self.model.parameters()
            for value in (param, *state.get(param, {}).values())
        ]
        return digest([*tensors, repr([options(g) for g in self.optimizer.param_groups])])


def options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def digest(things: Any) -> str:
    """Of tensors (their full values) and texts in nested lists and dicts."""
    found = hashlib.sha256()
    for thing in flatten(things):
        if isinstance(thing, torch.Tensor):
            local = thing.full_tensor() if isinstance(thing, DTensor) else thing
            thing = (str(local.dtype), local.detach().cpu().contiguous().numpy().tobytes())
        found.update(repr(thing).encode())
    return found.hexdigest()


def flatten(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        for key in sorted(thing, key=str):
            yield key
            yield from flatten(thing[key])
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from flatten(item)
    else:
        yield thing


def form_options(form: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=form == "flat")


def run_on(nproc: int, job: Any, *arguments: Any) -> Any:
    """What rank 0 returns; all ranks must have returned the same."""
    results = launch(job, *arguments, nproc=nproc, timeout=240)
    for result in results[1:]:
        assert result == results[0]
    return results[0]


def quietly() -> None:
    warnings.simplefilter("error")
    for text in QUIET:
        warnings.filterwarnings("ignore", message=f".*{text}")


# Files, and other numbers of ranks.


def job_save(layout: str, device: str, folder: str) -> dict[str, str]:
    """Train, and save everything in each form; the digests of states as they were saved."""
    quietly()
    saved = {}
    for kind in KINDS:
        run = Run(kind, layout, device, steps=2, fused=True)
        for form in FORMS:
            model, optimizer = get_state_dict(run.model, run.optimizer, options=form_options(form))
            path = Path(folder, f"{kind}-{form}")
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            dist.barrier()
            size = sum(file.stat().st_size for file in path.glob("*.distcp"))
            saved[f"{kind}-{form}"] = digest([model, optimizer])
            saved[f"{kind}-{form} bytes"] = str(size)
        run.train(1)  # the optimizer goes on as if nothing had been
        saved[f"{kind} later"] = run.digest()
    return saved


def job_load(layout: str, device: str, folder: str) -> dict[str, dict[str, str]]:
    """Load each file into each kind, and train on."""
    quietly()
    found: dict[str, dict[str, str]] = {"loaded": {}, "trained": {}}
    for path in sorted(Path(folder).iterdir()):
        source, _, written = path.name.partition("-")
        for kind in KINDS:
            if written == "flat" and source == kind:
                continue  # the other three say as much
            run = Run(kind, layout, device, fused=True)
            form = form_options(written)
            model, optimizer = get_state_dict(run.model, run.optimizer, options=form)
            state_dict = {"model": model, "optimizer": optimizer}
            dcp.load(state_dict, checkpoint_id=path)
            set_state_dict(
                run.model,
                run.optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
                options=form,
            )
            name = f"{path.name} into {kind}"
            # Nested and with full values: as all files are to be compared.
            found["loaded"][name] = digest(list(get_state_dict(run.model, run.optimizer)))
            run.train(2)
            found["trained"][name] = run.digest()
            assert run.device is None or run.device.held_bytes == 0
    return found


RESHARDS = [
    ("fsdp", 4, "fsdp", 2),
    ("fsdp", 2, "fsdp", 4),
    ("fsdp-tp", 4, "fsdp", 2),
    ("fsdp", 2, "fsdp-tp", 4),
]


@pytest.mark.parametrize(
    ("layout", "nproc", "other", "other_nproc"),
    RESHARDS,
    ids=[f"{a} on {m} to {b} on {n}" for a, m, b, n in RESHARDS],
)
def test_files_of_other_layouts(
    layout: str, nproc: int, other: str, other_nproc: int, tmp_path: Path
) -> None:
    """Native and swapped, nested and flat, each into each, and two steps after."""
    saved = run_on(nproc, job_save, layout, DEVICE, str(tmp_path))
    for form in FORMS:
        assert saved[f"native-{form}"] == saved[f"swapped-{form}"]
        sizes = [int(saved[f"{kind}-{form} bytes"]) for kind in KINDS]
        assert abs(sizes[1] - sizes[0]) <= 0.02 * sizes[0]
    assert saved["native later"] == saved["swapped later"]
    found = run_on(other_nproc, job_load, other, DEVICE, str(tmp_path))
    assert len(found["loaded"]) == 6
    assert set(found["loaded"].values()) == {saved["native-nested"]}
    assert len(set(found["trained"].values())) == 1


# The getters and setters.


def job_getters(device: str) -> dict[str, list[str]]:
    """What the getters give, with each option, of a trained optimizer and of a fresh one."""
    quietly()
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        for steps in (0, 2):
            run = Run(kind, "fsdp", device, steps=steps)
            for name, option in GETTER_OPTIONS.items():
                state_dict = get_optimizer_state_dict(
                    run.model, run.optimizer, options=StateDictOptions(**option)
                )
                values = on_rank_0(digest(state_dict))
                found.setdefault(f"{name} after {steps}", []).append(values)
            run.train(3)
            found.setdefault(f"trained from {steps}", []).append(run.digest())
    return found


GETTER_OPTIONS: dict[str, dict[str, Any]] = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full, flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
}


def on_rank_0(value: str) -> str:
    """The value of rank 0, on all ranks: some options give others less."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0)
    return str(values[0])


def test_getters_give_what_they_give_natively() -> None:
    """Also of a fresh optimizer, which they bring to life with a step: as natively, again."""
    found = run_on(2, job_getters, DEVICE)
    assert len(found) == 2 * (len(GETTER_OPTIONS) + 1)
    for name, digests in found.items():
        assert len(digests) == 2, name
        assert digests[0] == digests[1], name


SETTER_OPTIONS: dict[str, dict[str, Any]] = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    # Natively too, full and flat cannot be set.
    "full": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "offloaded, broadcast": {
        "full_state_dict": True,
        "broadcast_from_rank0": True,
        "cpu_offload": True,
    },
}


# From what, into what, which was trained before for how many steps.
PAIRS = [
    ("native", "native", 0),
    ("native", "swapped", 0),
    ("swapped", "native", 0),
    ("swapped", "swapped", 3),
]


def job_setters(device: str) -> dict[str, list[str]]:
    """From each kind into each kind, with each option, and two steps after."""
    quietly()
    found: dict[str, list[str]] = {}
    sources = {kind: Run(kind, "fsdp", device, steps=2, lr=0.02) for kind in KINDS}
    for name, option in SETTER_OPTIONS.items():
        got = StateDictOptions(**{k: v for k, v in option.items() if k != "broadcast_from_rank0"})
        for source, kind, steps in PAIRS:
            origin = sources[source]
            model, optimizer = get_state_dict(origin.model, origin.optimizer, options=got)
            if "native" in (source, kind):  # which share what they give and are given
                optimizer = tree_map_only(torch.Tensor, torch.clone, optimizer)
            run = Run(kind, "fsdp", device, steps=steps)
            load(run, model, optimizer, StateDictOptions(**option))
            run.steps = 2
            found.setdefault(f"{name}, loaded", []).append(run.digest())
            run.train(2)
            found.setdefault(f"{name}, trained", []).append(run.digest())
            found.setdefault(f"{name}, source", []).append(origin.digest())
    return found


def load(run: Run, model: Any, optimizer: Any, option: StateDictOptions) -> None:
    # Setters write into the dicts that they are given.
    model, optimizer = tree_map(lambda leaf: leaf, (model, optimizer))
    # Natively too, set_state_dict with a broadcast hangs if other ranks have an empty dict.
    if not option.broadcast_from_rank0:
        set_state_dict(
            run.model,
            run.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=option,
        )
    else:
        set_model_state_dict(run.model, model, options=option)
        set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=option)


def test_setters_load_what_they_load_natively() -> None:
    found = run_on(2, job_setters, DEVICE)
    assert len(found) == 3 * len(SETTER_OPTIONS)
    for name, digests in found.items():
        assert len(digests) == len(PAIRS), name
        assert len(set(digests)) == 1, name


FROZEN = "blocks.0.feed_forward.up.weight"


def job_frozen(device: str) -> list[str]:
    """A parameter that was trained and then frozen, through a state dict of its own optimizer."""
    quietly()
    found = []
    for kind in KINDS:
        run = Run(kind, "fsdp", device, steps=2)
        dict(run.model.named_parameters())[FROZEN].requires_grad_(False)
        run.train(1)
        state_dict = run.optimizer.state_dict()
        fresh = Run(kind, "fsdp", device)
        fresh.model.load_state_dict(run.model.state_dict())
        fresh.optimizer.load_state_dict(state_dict)
        assert len(fresh.optimizer.state[dict(fresh.model.named_parameters())[FROZEN]]) == 3
        fresh.steps = 3
        fresh.train(2)
        found.append(fresh.digest())
    return found


def test_states_of_frozen_parameters_are_kept() -> None:
    native, swapped = run_on(2, job_frozen, DEVICE)
    assert native == swapped
