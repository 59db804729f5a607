# SPDX-License-Identifier: Apache-2.0
"""Train natively and swapped in this process, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

import mindspore as ms

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Alignment, RunRecord, compare_runs
from swap_testkit.array import Tolerance
from swap_testkit.mindspore.record import Wrap, record_run, wrapper
from swap_testkit.mindspore.scenarios import OPTIMIZERS, SCENARIOS, Scenario
from swap_testkit.mindspore.trainer import Job, JobTrainer
from swap_testkit.outcome import RankOutcome, described, merge
from swap_testkit.reference import FunctionReference
from swap_testkit.selection import select_scenarios

__all__ = [
    "Builder",
    "align_job",
    "align_scenario",
    "available_optimizers",
    "check_device",
    "find_scenarios",
    "outcomes_of",
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

    return _alignments(name, {"": make}, configs, steps, tolerance)


def align_scenario(
    name: str,
    *,
    optimizers: Sequence[str],
    configs: Sequence[SwapOptimizerConfig],
    steps: int,
    device: str,
) -> list[Alignment]:
    """Run one scenario with several optimizers, and compare exactly.

    Returns:
        One alignment per optimizer and config, in this order.
    """
    check_device(device)
    makes: dict[str, Callable[[], JobTrainer]] = {
        f"{optimizer}, ": partial(_scenario_trainer, name, optimizer) for optimizer in optimizers
    }
    return _alignments(f"mindspore {name}", makes, configs, steps, Tolerance())


def find_scenarios(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, or all for ``all``.

    Raises:
        ValueError: a name is unknown; the message has those that are known.
    """
    return select_scenarios(names, SCENARIOS)


def available_optimizers(names: Sequence[str] | None) -> list[str]:
    """The optimizers of these names, or all for None.

    Raises:
        ValueError: a name is unknown.
    """
    for name in names or ():
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizer {name!r} is unknown; there are: {', '.join(OPTIMIZERS)}.")
    return list(names or OPTIMIZERS)


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


def _scenario_trainer(name: str, optimizer: str) -> JobTrainer:
    ms.set_seed(0)
    return JobTrainer(SCENARIOS[name].build(OPTIMIZERS[optimizer], 0))


def _alignments(
    training: str,
    makes: Mapping[str, Callable[[], JobTrainer]],
    configs: Sequence[SwapOptimizerConfig],
    steps: int,
    tolerance: Tolerance,
) -> list[Alignment]:
    alignments = []
    for prefix, make in makes.items():
        wraps = [wrapper(config) for config in configs]
        outcomes = outcomes_of(make, wraps, steps, 0, tolerance)
        for config, outcome in zip(configs, outcomes, strict=True):
            variant = prefix + described(config, packed_by_default=False)
            alignments.append(merge(training, variant, [outcome], steps, tolerance))
    return alignments


def outcomes_of(
    make: Callable[[], JobTrainer],
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
    make: Callable[[], JobTrainer],
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
