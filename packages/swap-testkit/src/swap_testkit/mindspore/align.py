# SPDX-License-Identifier: Apache-2.0
"""Train natively and swapped, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

import mindspore as ms

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Alignment, RunRecord, compare_runs
from swap_testkit.array import Tolerance
from swap_testkit.mindspore.launch import Work, launch
from swap_testkit.mindspore.optimizers import OPTIMIZERS, installed_optimizers
from swap_testkit.mindspore.record import Wrap, record_run, wrapper
from swap_testkit.mindspore.scenarios import SCENARIOS, Scenario
from swap_testkit.mindspore.trainer import Job, JobTrainer, Trainer
from swap_testkit.mindspore.world import ALONE, World
from swap_testkit.outcome import RankOutcome, described, merge
from swap_testkit.reference import FunctionReference
from swap_testkit.selection import select_scenarios

__all__ = [
    "Builder",
    "align_job",
    "align_scenarios",
    "available_optimizers",
    "check_device",
    "find_scenarios",
    "outcomes_of",
    "outcomes_on_rank",
    "variants",
]

Builder: TypeAlias = Callable[[int], Job]
"""From a seed to a job. Called before each run; the same seed must give the same."""


def align_job(
    builder: Builder | str,
    *,
    steps: int,
    configs: Sequence[SwapOptimizerConfig],
    seed: int,
    device: str,
    tolerance: Tolerance,
) -> list[Alignment]:
    """Compare a user's training with each of the configs. See :func:`swap_testkit.align`."""
    found = FunctionReference.named(builder).find() if isinstance(builder, str) else builder
    name = builder if isinstance(builder, str) else f"{found.__module__}:{found.__qualname__}"
    check_device(device)

    def make() -> JobTrainer:
        ms.set_seed(seed)
        job = found(seed)
        if not isinstance(job, Job):
            raise TypeError(
                f"builder returned {job!r}; it must return a swap_testkit.mindspore.Job."
            )
        return JobTrainer(job)

    wraps = [wrapper(config) for config in configs]
    outcomes = outcomes_of(make, wraps, steps, 0, tolerance)
    return [
        merge(name, described(config, packed_by_default=False), [outcome], steps, tolerance)
        for config, outcome in zip(configs, outcomes, strict=True)
    ]


def align_scenarios(
    names: Sequence[str],
    *,
    optimizers: Sequence[str],
    config: SwapOptimizerConfig,
    steps: int,
    device: str,
    nproc: int = 1,
    timeout: float = 600.0,
) -> list[Alignment]:
    """Run scenarios with several optimizers, and compare exactly.

    Args:
        names: Scenarios that run on ``nproc`` processes.
        optimizers: Names of :data:`swap_testkit.mindspore.optimizers.OPTIMIZERS`.
        config: How to swap; with ``packed_swap=None`` in every way that an optimizer has.
        steps: How many.
        device: The ``device_target`` of this process.
        nproc: Processes; more than one are started by msrun, once for all scenarios.
        timeout: Seconds after which those are killed.

    Returns:
        One alignment per scenario, optimizer and way, in this order.
    """
    check_device(device)
    work = Work(tuple(names), tuple(optimizers), config, steps)
    by_rank = (
        [outcomes_on_rank(work, ALONE)]
        if nproc == 1
        else launch(work, nproc=nproc, timeout=timeout)
    )
    suffix = f" on {nproc}" if nproc > 1 else ""
    return [
        merge(
            f"mindspore {name}{suffix}",
            f"{optimizer}, {described(each, packed_by_default=False)}",
            [outcomes[number] for outcomes in by_rank],
            steps,
            Tolerance(),
        )
        for number, (name, optimizer, each) in enumerate(variants(work))
    ]


def outcomes_on_rank(work: Work, world: World) -> list[RankOutcome]:
    """Run all of ``work`` on this rank, in the order of :func:`variants`."""
    outcomes = []
    for name in work.scenarios:
        for optimizer in work.optimizers:
            kind = OPTIMIZERS[optimizer]
            make = partial(SCENARIOS[name].trainer, kind, 0, world)
            wraps = [wrapper(config) for config in kind.configs(work.config)]
            outcomes += outcomes_of(make, wraps, work.steps, world.rank, Tolerance())
    return outcomes


def variants(work: Work) -> list[tuple[str, str, SwapOptimizerConfig]]:
    """Everything that is compared: scenario, optimizer and config."""
    return [
        (name, optimizer, config)
        for name in work.scenarios
        for optimizer in work.optimizers
        for config in OPTIMIZERS[optimizer].configs(work.config)
    ]


def find_scenarios(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, or all that can run here for ``all``.

    Raises:
        ValueError: a name is unknown, or of a scenario that needs cards.
    """
    found = select_scenarios(names, SCENARIOS)
    if ms.get_context("device_target") != "CPU":
        return found
    needing = [scenario.name for scenario in found if scenario.cards_only and "all" not in names]
    if needing:
        raise ValueError(f"scenario {needing[0]!r} runs on Ascend cards only.")
    return [scenario for scenario in found if not scenario.cards_only]


def available_optimizers(names: Sequence[str] | None) -> list[str]:
    """The optimizers of these names, or all that can be made here for None.

    Raises:
        ValueError: a name is unknown.
    """
    for name in names or ():
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizer {name!r} is unknown; there are: {', '.join(OPTIMIZERS)}.")
    return list(names or installed_optimizers())


def check_device(device: str) -> None:
    """Refuse a device that is not the one of this process.

    Raises:
        ValueError: MindSpore has one device per process, and it is another.
    """
    target = ms.get_context("device_target").lower()
    if device != target:
        raise ValueError(
            f"device={device!r} is not accepted: MindSpore's device_target is {target!r} in this "
            f"process. Give that, or call mindspore.set_device first."
        )


def outcomes_of(
    make: Callable[[], Trainer],
    wraps: Sequence[Wrap],
    steps: int,
    rank: int,
    tolerance: Tolerance,
) -> list[RankOutcome]:
    """Run one native training and one for each wrap, on this rank.

    If something differs at the end, both are run again with every tensor fingerprinted after every
    step, to find where it began.

    Args:
        make: Makes a trainer, the same each time.
        wraps: What turns a native optimizer into the one to compare with it.
        steps: Steps of each run.
        rank: This process, for messages.
        tolerance: How far values may be apart.
    """
    native = record_run(make(), steps)
    return [_outcome(make, wrap, native, steps, rank, tolerance) for wrap in wraps]


def _outcome(
    make: Callable[[], Trainer],
    wrap: Wrap,
    native: RunRecord,
    steps: int,
    rank: int,
    tolerance: Tolerance,
) -> RankOutcome:
    started = perf_counter()
    swapped = record_run(make(), steps, wrap=wrap)
    mismatches = compare_runs(native, swapped, tolerance, rank)
    if mismatches:
        again = (
            record_run(make(), steps, watch=True),
            record_run(make(), steps, wrap=wrap, watch=True),
        )
        mismatches = compare_runs(*again, tolerance, rank) or mismatches
    seconds = perf_counter() - started
    return RankOutcome.between(native, swapped, mismatches, rank=rank, seconds=seconds)
