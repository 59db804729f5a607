# SPDX-License-Identifier: Apache-2.0
"""Align a user's job or a scenario: here, on forked ranks, or as one rank of torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Alignment
from swap_testkit.array import Tolerance
from swap_testkit.outcome import RankOutcome, described, merge
from swap_testkit.reference import FunctionReference
from swap_testkit.selection import select_scenarios
from swap_testkit.torch.align import align_trainers
from swap_testkit.torch.launch import launch, process_group
from swap_testkit.torch.parallel import Parallel, Place, parallelize
from swap_testkit.torch.record import wrapper
from swap_testkit.torch.scenarios import OPTIMIZERS, SCENARIOS, Scenario
from swap_testkit.torch.simulator.role import check_races, device_type
from swap_testkit.torch.trainer import Job, JobTrainer, Trainer

__all__ = [
    "Builder",
    "align_job",
    "align_scenario",
    "available_optimizers",
    "find_scenarios",
    "present_cards",
    "this_place",
    "work",
]

Builder: TypeAlias = Callable[[int], Job]
"""From a seed to a job. Called on each rank, before each run; the same seed must give the same."""


def align_job(
    builder: Builder | str,
    *,
    steps: int,
    configs: Sequence[SwapOptimizerConfig],
    seed: int,
    parallel: Parallel,
    nproc: int,
    device: str,
    tolerance: Tolerance,
    timeout: float,
) -> list[Alignment]:
    """Compare a user's training with each of the configs. See :func:`swap_testkit.align`."""
    reference = (
        FunctionReference.named(builder)
        if isinstance(builder, str)
        else FunctionReference.to(builder)
    )
    arguments = (reference, seed, parallel, device, steps, tuple(configs), tolerance)
    if nproc == 1 and parallel is Parallel.NONE:
        by_rank = [_job_on_rank(*arguments)]
    else:
        by_rank = launch(_job_on_rank, *arguments, nproc=nproc, timeout=timeout, device=device)
    name = f"{reference.module}:{reference.name}"
    training = name if nproc == 1 else f"{name}, {parallel.value} on {nproc}"
    return _merged(training, [described(c) for c in configs], by_rank, steps, tolerance)


def align_scenario(
    name: str,
    *,
    optimizers: Sequence[str],
    nproc: int,
    configs: Sequence[SwapOptimizerConfig],
    steps: int,
    device: str,
    timeout: float,
) -> list[Alignment]:
    """Run one scenario on ``nproc`` forked ranks, with several optimizers, and compare exactly.

    Returns:
        One alignment per optimizer and config, in this order.
    """
    steps = max(steps, SCENARIOS[name].least_steps)
    configs = SCENARIOS[name].varied(configs)
    arguments = (name, tuple(optimizers), device, steps, tuple(configs))
    by_rank = launch(scenario_on_rank, *arguments, nproc=nproc, timeout=timeout, device=device)
    variants = [f"{o}, {described(config)}" for o in optimizers for config in configs]
    return _merged(f"{name} on {nproc}", variants, by_rank, steps, Tolerance())


def scenario_on_rank(
    name: str,
    optimizers: Sequence[str],
    device: str,
    steps: int,
    configs: Sequence[SwapOptimizerConfig],
) -> list[RankOutcome]:
    """What one rank does of a scenario; all in one process group."""
    place = this_place(device)
    wraps = [wrapper(config, place.device) for config in configs]
    outcomes = []
    for optimizer in optimizers:
        make = partial(SCENARIOS[name].build, place, OPTIMIZERS[optimizer])
        outcomes += align_trainers(make, wraps, steps=steps, rank=place.rank)
        check_races(device, f"scenario {name} with {optimizer} on rank {place.rank}")
    return outcomes


def work(
    name: str,
    *,
    optimizers: Sequence[str] | None,
    configs: Sequence[SwapOptimizerConfig],
    steps: int,
    device: str,
    timeout: float = 600.0,
) -> list[Alignment]:
    """Be one rank of a scenario, in a process that torchrun started.

    Returns:
        The alignments of all ranks, on every rank.
    """
    (scenario,) = find_scenarios([name])
    chosen = available_optimizers(scenario, optimizers)
    with process_group(device, "env://", timeout):
        world = torch.distributed.get_world_size()
        if world not in scenario.worlds:
            raise ValueError(
                f"scenario {name!r} runs on {scenario.worlds} processes, not on {world}."
            )
        steps = max(steps, scenario.least_steps)
        configs = scenario.varied(configs)
        mine = scenario_on_rank(name, chosen, device, steps, configs)
        by_rank: list[list[RankOutcome]] = [[] for _ in range(world)]
        torch.distributed.all_gather_object(by_rank, mine)
    variants = [f"{o}, {described(config)}" for o in chosen for config in configs]
    return _merged(f"{name} on {world}", variants, by_rank, steps, Tolerance())


def find_scenarios(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, or all for ``all``.

    Raises:
        ValueError: a name is unknown; the message has those that are known.
    """
    return select_scenarios(names, SCENARIOS)


def present_cards() -> tuple[str, int]:
    """The type of accelerator that torch finds here, and how many; ``("cpu", 0)`` without."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu", 0
    return accelerator.type, torch.accelerator.device_count()


def available_optimizers(scenario: Scenario, names: Sequence[str] | None) -> list[str]:
    """The optimizers that a scenario is to run with.

    Args:
        scenario: Which.
        names: Asked for; None: all that the scenario runs with.

    Raises:
        ValueError: a name is unknown.
    """
    if names is None:
        return list(scenario.optimizers)
    for name in names:
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizer {name!r} is unknown; there are: {', '.join(OPTIMIZERS)}.")
    return list(names)


def this_place(device: str) -> Place:
    """Where this process is, from the variables that torchrun sets; alone without them."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    kind = device_type(device)
    where = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
    return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), where)


def _job_on_rank(
    builder: FunctionReference,
    seed: int,
    parallel: Parallel,
    device: str,
    steps: int,
    configs: Sequence[SwapOptimizerConfig],
    tolerance: Tolerance,
) -> list[RankOutcome]:
    place = this_place(device)
    make = partial(_job_trainer, builder.find(), seed, parallel, place)
    wraps = [wrapper(config, place.device) for config in configs]
    outcomes = align_trainers(make, wraps, steps=steps, rank=place.rank, tolerance=tolerance)
    check_races(device, f"the training on rank {place.rank}")
    return outcomes


def _job_trainer(
    builder: Callable[..., object], seed: int, parallel: Parallel, place: Place
) -> Trainer:
    torch.manual_seed(seed)
    job = builder(seed)
    if not isinstance(job, Job):
        raise TypeError(f"builder returned {job!r}; it must return a swap_testkit.torch.Job.")
    return JobTrainer(job, parallelize(job.model, parallel, place))


def _merged(
    training: str,
    variants: Sequence[str],
    by_rank: Sequence[Sequence[RankOutcome]],
    steps: int,
    tolerance: Tolerance,
) -> list[Alignment]:
    return [
        merge(training, variant, [outcomes[number] for outcomes in by_rank], steps, tolerance)
        for number, variant in enumerate(variants)
    ]
