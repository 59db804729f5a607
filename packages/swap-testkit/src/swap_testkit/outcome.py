# SPDX-License-Identifier: Apache-2.0
"""What one process found, and all processes' findings put together. Of no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swap_core import SwapOptimizerConfig
from swap_core.config import SCHEDULES
from swap_testkit.alignment import Alignment, Memory, Mismatch, RunRecord
from swap_testkit.array import Tolerance

__all__ = ["RankOutcome", "described", "merge"]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank found. Picklable, so it can come from another process."""

    rank: int
    losses: tuple[tuple[float, float], ...]
    compared: int
    mismatches: tuple[Mismatch, ...]
    native_memory: Memory
    swapped_memory: Memory
    native_step_seconds: float
    swapped_step_seconds: float
    seconds: float

    @classmethod
    def between(
        cls,
        native: RunRecord,
        swapped: RunRecord,
        mismatches: Sequence[Mismatch],
        *,
        rank: int,
        seconds: float,
    ) -> RankOutcome:
        """The outcome of two runs, in which ``mismatches`` were found within ``seconds``."""
        return cls(
            rank=rank,
            losses=tuple(zip(native.losses, swapped.losses, strict=True)),
            compared=len(native.arrays),
            mismatches=tuple(mismatches),
            native_memory=native.memory,
            swapped_memory=swapped.memory,
            native_step_seconds=median(native.step_seconds),
            swapped_step_seconds=median(swapped.step_seconds),
            seconds=seconds,
        )


def described(config: SwapOptimizerConfig, *, packed_by_default: bool = True) -> str:
    """Name a config in titles: ``packed x16``, and what else is special in it."""
    packed = packed_by_default if config.packed_swap is None else config.packed_swap
    plain = SwapOptimizerConfig()
    special = [
        f", {field}={getattr(config, field)}"
        for field in SCHEDULES
        if getattr(config, field) != getattr(plain, field)
    ]
    return f"{'packed' if packed else 'per tensor'} x{config.swap_times}{''.join(special)}"


def merge(
    training: str, variant: str, outcomes: Sequence[RankOutcome], steps: int, tolerance: Tolerance
) -> Alignment:
    """Put the ranks' outcomes of one comparison together."""
    mismatches = sorted(
        (mismatch for outcome in outcomes for mismatch in outcome.mismatches),
        key=lambda mismatch: (mismatch.step, mismatch.rank),
    )
    return Alignment(
        training=training,
        variant=variant,
        steps=steps,
        tolerance=tolerance,
        losses=next((outcome.losses for outcome in outcomes if outcome.losses), ()),
        compared=sum(outcome.compared for outcome in outcomes),
        mismatches=tuple(mismatches),
        native_memory=_largest([outcome.native_memory for outcome in outcomes]),
        swapped_memory=_largest([outcome.swapped_memory for outcome in outcomes]),
        native_step_seconds=max(outcome.native_step_seconds for outcome in outcomes),
        swapped_step_seconds=max(outcome.swapped_step_seconds for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
    )


def _largest(memories: Sequence[Memory]) -> Memory:
    return Memory(
        idle=max(memory.idle for memory in memories),
        peak=max(memory.peak for memory in memories),
        host=max(memory.host for memory in memories),
    )
