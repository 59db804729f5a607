# SPDX-License-Identifier: Apache-2.0
"""Train natively and swapped, in this process or on many, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeAlias

import torch

from swap_testkit.alignment import RunRecord, compare_runs
from swap_testkit.array import Tolerance
from swap_testkit.outcome import RankOutcome
from swap_testkit.torch.record import Wrap, record_run
from swap_testkit.torch.trainer import Trainer

__all__ = ["align_trainers"]

Make: TypeAlias = Callable[[], Trainer]


def align_trainers(
    make: Make,
    wraps: Sequence[Wrap],
    *,
    steps: int,
    rank: int = 0,
    tolerance: Tolerance | None = None,
) -> list[RankOutcome]:
    """Run one native training and one for each wrap, on this rank.

    The runs are free: nothing looks at states between steps. If something differs at the end, both
    are run again with every tensor fingerprinted after every step, to find where it began.

    Args:
        make: Makes a trainer, the same each time.
        wraps: What turns a native optimizer into the one to compare with it.
        steps: Steps of each run.
        rank: This process, for messages.
        tolerance: None: exact.
    """
    tolerance = tolerance or Tolerance()
    native = record_run(make(), steps)
    return [_outcome(make, wrap, native, steps, rank, tolerance) for wrap in wraps]


def _outcome(
    make: Make, wrap: Wrap, native: RunRecord, steps: int, rank: int, tolerance: Tolerance
) -> RankOutcome:
    started = perf_counter()
    swapped = record_run(make(), steps, wrap=wrap)
    mismatches = compare_runs(native, swapped, tolerance, rank)
    if _somewhere(bool(mismatches)):
        again = (
            record_run(make(), steps, watch=True),
            record_run(make(), steps, wrap=wrap, watch=True),
        )
        # A race may not show again; what was seen the first time counts.
        mismatches = compare_runs(*again, tolerance, rank) or mismatches
    seconds = perf_counter() - started
    return RankOutcome.between(native, swapped, mismatches, rank=rank, seconds=seconds)


def _somewhere(here: bool) -> bool:
    """Tell whether it is so on any rank: all must train again, or none."""
    if not torch.distributed.is_initialized():
        return here
    flag = torch.tensor([int(here)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
