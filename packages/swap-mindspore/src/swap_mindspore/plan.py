# SPDX-License-Identifier: Apache-2.0
"""What an update does: batches, copies and calls, bound once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from swap_core import Batch, Ledger, partition
from swap_mindspore.adapter import Member, MindSporeStep, MindSporeSwapAdapter, UpdateCall
from swap_mindspore.device import AnyMindSporeDevice, Memory, Transfer
from swap_mindspore.homes import AnyPipeline, Homes, Placed
from swap_mindspore.states import StateTable

__all__ = ["Lane", "Plan", "make_plan"]

_Batch: TypeAlias = Batch[Any, Memory, Transfer]


@dataclass(frozen=True, slots=True)
class Lane:
    """What moves through the device."""

    batches: tuple[_Batch, ...]
    calls: tuple[UpdateCall, ...]
    """One for each batch."""
    pipeline: AnyPipeline
    ring: int
    """How many batches use different device memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way through an update, for as long as the adapter's signature is the same."""

    signature: object
    staying: UpdateCall
    """The parameters none of whose states swap."""
    lane: Lane | None
    """None: nothing moves."""


def make_plan(
    adapter: MindSporeSwapAdapter,
    table: StateTable,
    swap_times: int,
    homes: Homes | None,
    device: AnyMindSporeDevice | None,
    ledger: Ledger,
) -> Plan:
    """Cut the parameters that are updated into batches, and move their states to fit.

    Args:
        adapter: Tells which parameters are updated.
        table: The states.
        swap_times: Target number of batches.
        homes: The way to place states; None: nothing swaps.
        device: What ``homes`` allocates on, or None.
        ledger: Where memory is counted.

    Raises:
        MemoryError: no host memory. Nothing has changed.
    """
    units = adapter.iter_update_units(MindSporeStep((), None, None))
    updated = [unit.adapter_index for unit in units]
    moving = [index for index in updated if table.candidates_of(index)]
    lane = None
    if homes is not None and device is not None:
        sizes = [sum(map(homes.nbytes_of, table.candidates_of(index))) for index in moving]
        parts = partition(sizes, swap_times)
        order = homes.order([sum(sizes[part.start : part.stop]) for part in parts])
        batches = [moving[parts[i].start : parts[i].stop] for i in order]
        placed = table.place(batches, homes, ledger)
        if placed:
            lane = _lane(batches, placed, table, homes, device, ledger)
    staying = [index for index in updated if not table.candidates_of(index)]
    ledger.plans_built += 1
    return Plan(adapter.signature(), _call(staying, table), lane)


def _lane(
    batches: Sequence[Sequence[int]],
    placed: Sequence[Placed],
    table: StateTable,
    homes: Homes,
    device: AnyMindSporeDevice,
    ledger: Ledger,
) -> Lane:
    pipeline, ring = homes.pipeline(ledger)
    return Lane(
        batches=tuple(_batch(index, each, device) for index, each in enumerate(placed)),
        calls=tuple(_call(indices, table) for indices in batches),
        pipeline=pipeline,
        ring=ring,
    )


def _call(indices: Iterable[int], table: StateTable) -> UpdateCall:
    return UpdateCall(tuple(Member(index, table.tensors_of(index)) for index in indices))


def _batch(index: int, placed: Placed, device: AnyMindSporeDevice) -> _Batch:
    return Batch(
        index=index,
        nbytes=placed.nbytes,
        memory=placed.memory,
        transfers=placed.transfers,
        restored=device.create_event(),
        loaded=device.create_event(),
        updated=device.create_event(),
        stored=device.create_event(),
    )
