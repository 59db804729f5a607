# SPDX-License-Identifier: Apache-2.0
"""Every ready-made scenario on its fewest processes (`nox -s align` runs them all in full)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swap_core import SwapOptimizerConfig
from swap_core.config import SCHEDULES
from swap_testkit.torch import hyper_standin, launch
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.run import align_scenario, available_optimizers, find_scenarios
from swap_testkit.torch.scenarios import OPTIMIZERS, SCENARIOS, Scenario

CONFIGS = [
    SwapOptimizerConfig(swap_times=3, min_numel=16, packed_swap=packed) for packed in (True, False)
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_aligned(name: str) -> None:
    scenario = SCENARIOS[name]
    results = align_scenario(
        name,
        optimizers=["adamw"],
        nproc=scenario.worlds[0],
        configs=CONFIGS,
        steps=3,
        device="cpu",
        timeout=120,
    )
    # Per tensor there is no arena that could be kept.
    kept = sum("zigzag" in fields for fields in scenario.schedules)
    assert len(results) == 2 * len(scenario.schedules) - kept
    for result in results:
        assert result.aligned, result.explain()
        assert result.compared > 0
        assert len(result.losses) == max(3, scenario.least_steps)
        # The uneven ones have states of a few bytes, each of which takes 512 in an arena.
        if "uneven" not in name:
            assert result.swapped_memory.peak < result.native_memory.idle
        if "device_budget" not in result.variant:
            assert result.swapped_memory.idle < result.native_memory.idle / 2
    kinds = {result.variant.split(" x")[0] for result in results}
    assert kinds == {"adamw, packed", "adamw, per tensor"}


def test_a_scenario_runs_the_steps_that_it_needs() -> None:
    (result,) = align_scenario(
        "single",
        optimizers=["adamw"],
        nproc=1,
        configs=CONFIGS[:1],
        steps=1,
        device="cpu",
        timeout=120,
    )
    assert result.steps == len(result.losses) == 2
    longer = {name for name, scenario in SCENARIOS.items() if scenario.least_steps > 2}
    # After the step that is skipped comes another; what is done in backward passes is learnt first.
    assert longer == {"fsdp-fp16", "fsdp-scaler", "schedules", "fsdp-schedules"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_is_aligned_and_really_another(optimizer: str) -> None:
    (result,) = align_scenario(
        "single",
        optimizers=[optimizer],
        nproc=1,
        configs=CONFIGS[:1],
        steps=3,
        device="cpu",
        timeout=120,
    )
    assert result.aligned, result.explain()
    made = OPTIMIZERS[optimizer]([torch.nn.Parameter(torch.ones(1))])
    expected = {
        "adam": ("Adam", None, False),
        "adam-amsgrad": ("Adam", None, True),
        "adamw": ("AdamW", None, False),
        "adamw-fused": ("AdamW", True, False),
        "hyper-adamw": ("AdamW", None, False),
    }.get(optimizer, (optimizer, None, None))
    defaults = made.defaults
    name = type(made).__name__ if "amsgrad" in defaults else type(made).__name__.lower()
    assert (name, defaults.get("fused"), defaults.get("amsgrad")) == expected


@pytest.mark.parametrize("name", ["schedules", "fsdp-schedules"])
def test_a_scenario_of_schedules_has_each_of_them(name: str) -> None:
    configs = SCENARIOS[name].varied(CONFIGS)
    plain = SwapOptimizerConfig()
    for field in SCHEDULES:
        used = [each for each in configs if getattr(each, field) != getattr(plain, field)]
        assert used, field
        assert {each.packed_swap for each in used} == (
            {True} if field == "zigzag" else {True, False}
        )
    assert SCENARIOS["single"].varied(CONFIGS) == tuple(CONFIGS)


def test_the_stand_in_for_hyperparallel_gives_kernels_steps_that_they_read() -> None:
    """Fused kernels of CUDA take the step for float32, whatever it is: an integer gives NaN."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "fused_adamw" in str(func):
                seen.extend(step.dtype for step in args[5])
            return func(*args, **(kwargs or {}))

    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with Seen():
        hyper_standin.AdamW([param]).step()
    assert seen == [torch.float32]


def shapes_of_shards() -> list[tuple[int, ...]]:
    place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu"))
    trainer = SCENARIOS["fsdp-uneven"].build(place, OPTIMIZERS["adamw"])
    return [tuple(p.to_local().shape) for p in trainer.named_parameters().values()]  # type: ignore[attr-defined]


def test_the_uneven_scenario_has_uneven_and_empty_shards() -> None:
    by_rank = launch(shapes_of_shards, nproc=4)
    assert (0,) in by_rank[3]
    assert len({shapes[0][0] for shapes in by_rank}) == 1
    assert len({shapes[2][0] for shapes in by_rank}) > 1


def idle_experts() -> int:
    place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu"))
    trainer = SCENARIOS["ep"].build(place, OPTIMIZERS["adamw"])
    idle = 0
    for step in range(4):
        trainer.train_step(step)
        idle += sum(
            p.grad is None for name, p in trainer.named_parameters().items() if ".experts." in name
        )
    return idle


def test_experts_are_idle_in_some_steps_of_the_expert_scenario() -> None:
    assert sum(launch(idle_experts, nproc=2)) > 0


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"scenario 'fdsp' is unknown; there are: all, single"):
        find_scenarios(["fdsp"])
    with pytest.raises(ValueError, match=r"optimizer 'sdg' is unknown; there are: adam"):
        available_optimizers(SCENARIOS["fsdp"], ["sdg"])
    assert find_scenarios(["all"]) == list(SCENARIOS.values())
    assert isinstance(SCENARIOS["fsdp"], Scenario)


def test_the_same_scenario_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = ["-m", "swap_testkit", "worker", "--scenario", "ddp", "--steps", "2"]
    done = subprocess.run(
        [*command, *worker, "--optimizer", "adamw", "--min-numel", "16"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 (exact)" in done.stdout
