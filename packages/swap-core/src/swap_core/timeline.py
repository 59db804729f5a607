# SPDX-License-Identifier: Apache-2.0
"""From the times of a step's events to what each stream did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BatchTimes", "StepTimes", "step_times"]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds since the start of the update, or since its call, for one batch."""

    load_start: float
    load_end: float
    update_start: float
    update_end: float
    store_start: float
    store_end: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one update. Transfers overlap with updates, so the parts exceed the total."""

    total: float
    """From the first restore to the end of the last store, or update; if it began in the backward
    pass, from the call of ``step()``."""
    load: float
    """The load stream copied."""
    update: float
    """The compute stream updated parameters whose states swap."""
    meanwhile: float
    """The compute stream updated the others."""
    store: float
    """The store stream copied."""
    wait: float
    """The compute stream stood still for a transfer, the end of the last store included unless that
    was left to overlap with what comes after the update."""
    batches: tuple[BatchTimes, ...]


def step_times(
    loaded: Sequence[float],
    updated: Sequence[float],
    stored: Sequence[float],
    *,
    ring: int,
    update_after_store: bool,
    meanwhile: float = 0.0,
    tail_left: bool = False,
) -> StepTimes:
    """Reconstruct a step from the ends of its copies and updates.

    Starts are not measured: a copy starts when its stream is free and what it waits for is there.

    Args:
        loaded: For each batch, seconds from the first restore to the end of its load; from the call
            of an update that began before it, and 0 for what ended before that.
        updated: The same for the end of its update.
        stored: The same for the end of its store; of a batch that is kept on the device, for that
            of its update.
        ring: A load waits for the store of the batch this many before it.
        update_after_store: Whether an update also waits for the store of the batch before
            (the per-tensor pipeline, in which a load also waits for the update two before).
        meanwhile: The same for the end of the work that needs no swapped state.
        tail_left: The compute stream does not wait for the last store.
    """
    batches: list[BatchTimes] = []
    for i in range(len(loaded)):
        load_start = max(loaded[i - 1] if i else 0.0, stored[i - ring] if i >= ring else 0.0)
        gate = meanwhile
        if i and update_after_store:
            load_start = max(load_start, meanwhile, updated[i - 2] if i >= 2 else 0.0)
            gate = stored[i - 1]
        update_start = max(loaded[i], updated[i - 1] if i else 0.0, gate)
        store_start = max(updated[i], stored[i - 1] if i else 0.0)
        batches.append(
            BatchTimes(
                # What ended before the time 0 took no time since, and a kept batch is not stored.
                min(load_start, loaded[i]),
                loaded[i],
                min(update_start, updated[i]),
                updated[i],
                min(store_start, stored[i]),
                stored[i],
            )
        )
    update = sum(batch.update_end - batch.update_start for batch in batches)
    computed = max([meanwhile, *updated[-1:]])
    total = max([computed, *stored])
    return StepTimes(
        total=total,
        load=sum(batch.load_end - batch.load_start for batch in batches),
        update=update,
        meanwhile=meanwhile,
        store=sum(batch.store_end - batch.store_start for batch in batches),
        # At least 0: a sum of differences may exceed the difference of its ends by a rounding.
        wait=max(0.0, (computed if tail_left else total) - update - meanwhile),
        batches=tuple(batches),
    )
