# SPDX-License-Identifier: Apache-2.0
"""Laws of memory and movement: what is where, how much, in which order."""

from __future__ import annotations

from itertools import pairwise

import torch

from swap_testkit.order import check_order
from swap_testkit.torch.laws.subject import Pair, Subject, engine_of, law_config, report_of
from swap_testkit.torch.recording import record_updates
from swap_torch.sharding import local_of

__all__ = ["memory", "order", "steady_state"]


def memory(subject: Subject) -> None:
    """States take no device memory between updates, and in one what the batches say; at once."""
    for packed in (True, False):
        for swap_times in (1, 3, 99):
            for native_steps in (0, 1):
                config = law_config(swap_times=swap_times, packed_swap=packed, min_numel=4)
                pair = Pair(subject, config, native_steps=native_steps)
                _check_places(pair, "wrapping")
                for _ in range(3):
                    pair.inner.peak_bytes = 0
                    pair.train(1)
                    _check_places(pair, f"step {pair.steps}")
                    peak, most = pair.inner.peak_bytes, _largest(pair, packed)
                    assert peak == most, f"{peak} bytes at most in an update, expected {most}"


def _check_places(pair: Pair, after: str) -> None:
    """Every state that may swap is in host memory now."""
    shown = engine_of(pair.swapped)._table.homes.by_shown()
    for number, entry in enumerate(pair.swapped.state.values()):
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor) or id(value) in shown:
                continue
            local = local_of(value)
            swaps = local.is_floating_point() and local.numel() >= pair.config.min_numel
            assert not swaps, (
                f"{key} of the state number {number} has {local.numel()} elements and is on the "
                f"device after {after}; either the adapter does not name it, or it is of another "
                f"shape, dtype or layout than the adapter's template says"
            )


def _largest(pair: Pair, packed: bool) -> int:
    sizes = report_of(pair.swapped).batch_bytes
    if not packed:
        return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
    return max(sizes[0::2]) + max(sizes[1::2], default=0)


def order(subject: Subject) -> None:
    """Every load, update, store and read of the same bytes is ordered, by events and streams."""
    for packed in (True, False):
        pair = Pair(subject, law_config(packed_swap=packed, swap_times=99))
        record_updates(pair.swapped, pair.device)
        pair.train(3)
        found = check_order(pair.device.log)
        assert not found, str(found[0])
        copies = len(pair.device.ops("copy_in")), len(pair.device.ops("copy_out"))
        assert copies[0] == copies[1], f"{copies[0]} loads, but {copies[1]} stores"


def steady_state(subject: Subject) -> None:
    """From the third step on nothing is planned, allocated or bound anew."""
    pair = Pair(subject, law_config())
    pair.train(3)
    before = report_of(pair.swapped).ledger
    pair.train(3)
    after = report_of(pair.swapped).ledger
    for what in ("plans_built", "views_made", "host_allocations"):
        made = getattr(after, what) - getattr(before, what)
        assert made == 0, f"{what} grew by {made} in three steps that are all alike"
    pairs = (after.bytes_loaded, after.bytes_stored)
    assert pairs[0] == pairs[1], f"{pairs[0]} bytes were loaded, but {pairs[1]} stored"
