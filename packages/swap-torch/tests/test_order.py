# SPDX-License-Identifier: Apache-2.0
"""Streams: what is queued where, in which order, and that every wait is necessary.

The real pipelines run on a recorded device. ``check_order`` finds accesses to the same bytes that
no event orders, whatever the timing of this run was.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swap_testkit import Op, Tamper, check_order
from swap_testkit.torch import (
    CopySchedule,
    CpuAsDevice,
    TorchRecordingDevice,
    host_region_of,
    record_updates,
)
from swap_torch import SwapOptimizerConfig as Config

SHAPES = [(33, 17), (1024,), (3,), (300, 7), (2049,)]
GROUPS = [{"params": SHAPES[:2]}, {"params": SHAPES[2:], "lr": 0.1}]
LAYOUTS = [
    *[(True, batches, 2) for batches in (1, 2, 3, 4, 5)],
    *[(True, batches, 3) for batches in (2, 3, 4, 5)],
    *[(False, batches, 2) for batches in (1, 2, 3, 4, 5)],
]
layouts = pytest.mark.parametrize(("packed", "batches", "arenas"), LAYOUTS)


class Recorded:
    """Twins, the second of which logs what it asks of its device."""

    def __init__(self, twins: Callable[..., Any], source: Any, layout: tuple[bool, int, int]):
        packed, batches, arenas = layout
        self.inner = CpuAsDevice()
        self.device = TorchRecordingDevice(self.inner)
        config = Config(swap_times=batches, min_numel=0, packed_swap=packed, staging_buffers=arenas)
        self.twins = twins(source, config=config, device=self.device)
        self.swapped: Any = self.twins.swapped
        record_updates(self.swapped, self.device)

    def step(self, mask: Any = None) -> None:
        """Step both, without looking at the swapped one's states."""
        self.twins.give_gradients(mask)
        self.twins.native.step()
        self.swapped.step()

    def first_step(self) -> list[Op]:
        """The log of the first step."""
        self.step()
        return self.device.log

    def steady_step(self) -> list[Op]:
        """The log of the third step."""
        self.step()
        self.step()
        self.device.log.clear()
        self.step()
        return self.device.log


def positions(log: list[Op], verb: str) -> list[int]:
    return [position for position, op in enumerate(log) if op.verb == verb]


MASKS = [
    None,
    [True, False, True, True, True],
    [False, False, False, True, True],
    [True, True, False, False, False],
    None,
    [False, True, False, False, False],
    [True, False, True, True, True],
    [False] * 5,
    None,
]


@layouts
@pytest.mark.parametrize("source", [SHAPES, GROUPS], ids=["one-group", "two-groups"])
def test_every_access_is_ordered(
    source: Any, packed: bool, batches: int, arenas: int, twins: Callable[..., Any]
) -> None:
    recorded = Recorded(twins, source, (packed, batches, arenas))
    for mask in MASKS:
        recorded.step(mask)
    assert [str(found) for found in check_order(recorded.device.log)] == []
    recorded.twins.check()
    assert recorded.inner.held_bytes == 0


def caught(recorded: Recorded, verb: str, nth: int) -> bool:
    """Leave out one call in the second step, and tell whether an access is unordered."""
    recorded.step()
    recorded.device.tamper = Tamper(verb, nth)
    recorded.step()
    assert recorded.device.tamper.fired == 1
    recorded.device.tamper = None
    recorded.step()
    return bool(check_order(recorded.device.log))


@layouts
def test_every_missing_wait_is_caught(
    packed: bool, batches: int, arenas: int, twins: Callable[..., Any]
) -> None:
    layout = (packed, batches, arenas)
    waits = len(positions(Recorded(twins, SHAPES, layout).steady_step(), "wait"))
    # An update for its load, a store for its update, a load for memory, memory for the store of
    # the update before.
    assert waits >= 2 * batches + 2
    missed = [n for n in range(waits) if not caught(Recorded(twins, SHAPES, layout), "wait", n)]
    assert missed == [EARLIER_STORES] * is_covered(layout)


EARLIER_STORES = 0
"""Which wait of an update is the one for the stores of the update before."""


def is_covered(layout: tuple[bool, int, int]) -> bool:
    """With more batches than fit on the device, other waits keep each load behind those stores."""
    _, batches, arenas = layout
    return batches > arenas


@layouts
def test_every_missing_record_is_caught(
    packed: bool, batches: int, arenas: int, twins: Callable[..., Any]
) -> None:
    layout = (packed, batches, arenas)
    log = Recorded(twins, SHAPES, layout).steady_step()
    records = [op for op in log if op.verb == "record"]
    # Some are there for the times in the report alone: nothing waits for their events.
    waits = [op for op in log if op.verb == "wait"]
    awaited = {op.event for op in waits[is_covered(layout) :]}
    needed = [n for n, op in enumerate(records) if op.event in awaited]
    found = [n for n in range(len(records)) if caught(Recorded(twins, SHAPES, layout), "record", n)]
    assert found == needed


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_an_update_that_does_not_wait_computes_with_nan(
    batch: int, packed: bool, twins: Callable[..., Any]
) -> None:
    """The device notices too, when copies run as late as waits allow."""
    waits = [op for op in Recorded(twins, SHAPES, (packed, 3, 2)).first_step() if op.verb == "wait"]
    loaded = [n for n, op in enumerate(waits) if op.stream == "compute"]
    device = TorchRecordingDevice(CpuAsDevice(schedule=CopySchedule.LATEST, poison=True))
    pair = twins(
        SHAPES, config=Config(min_numel=0, swap_times=3, packed_swap=packed), device=device
    )
    pair.give_gradients()
    pair.native.step()
    # Packed, the compute stream waits for loads only, and for the last store; per tensor also
    # for the store of each batch, after the load of the next.
    device.tamper = Tamper("wait", loaded[batch if packed else max(0, 2 * batch - 1)])
    pair.swapped.step()
    assert device.tamper.fired == 1
    with pytest.raises(AssertionError, match="nan"):
        pair.check()


@layouts
def test_the_load_of_the_next_batch_is_queued_before_an_update(
    packed: bool, batches: int, arenas: int, twins: Callable[..., Any]
) -> None:
    log = Recorded(twins, SHAPES, (packed, batches, arenas)).steady_step()
    loads, updates = positions(log, "copy_in"), positions(log, "update")
    stores = positions(log, "copy_out")
    assert len(loads) == len(updates) == len(stores) == batches
    for batch in range(batches):
        ahead = min(batch + (arenas - 1 if packed else 1), batches - 1)
        assert loads[ahead] < updates[batch] < stores[batch]
        if batch + 1 < batches:
            assert stores[batch] < updates[batch + 1]


@layouts
def test_copies_run_on_their_own_streams(
    packed: bool, batches: int, arenas: int, twins: Callable[..., Any]
) -> None:
    recorded = Recorded(twins, GROUPS, (packed, batches, arenas))
    for mask in MASKS:
        recorded.step(mask)
    device = recorded.device
    assert {verb: {op.stream for op in device.ops(verb)} for verb in VERBS} == VERBS
    # The last batch's memory is released behind its store.
    assert {"store"} <= {op.stream for op in device.ops("release")} <= {"compute", "store"}


VERBS = {
    "copy_in": {"load"},
    "copy_out": {"store"},
    "update": {"compute"},
    "restore": {"compute"},
    "record": {"compute", "load", "store"},
    "wait": {"compute", "load", "store"},
}


# The host.


@layouts
def test_a_steady_step_does_not_block_the_host(
    packed: bool, batches: int, arenas: int, twins: Callable[..., Any]
) -> None:
    recorded = Recorded(twins, GROUPS, (packed, batches, arenas))
    recorded.step()
    recorded.step([True, False, True, True, True])
    for _ in range(3):
        recorded.step()
        recorded.step([True, False, True, True, True])
    plans = recorded.swapped._swap.ledger.plans_built
    assert plans == 2
    # Planning may: once, for the second plan, after the first step.
    assert len(recorded.device.ops("synchronize")) == 1


def save(optimizer: torch.optim.Optimizer) -> None:
    torch.save(optimizer.state_dict(), io.BytesIO())


READERS: dict[str, Callable[[Any], Any]] = {
    "state": lambda optimizer: optimizer.state,
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "save": save,
    "swap_report": lambda optimizer: optimizer.swap_report(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_the_last_store_once(
    reader: str, packed: bool, twins: Callable[..., Any]
) -> None:
    recorded = Recorded(twins, SHAPES, (packed, 3, 2))
    log = recorded.steady_step()
    last_store = next(op for op in reversed(log) if op.verb == "record" and op.stream == "store")
    length = len(log)
    READERS[reader](recorded.swapped)
    READERS[reader](recorded.swapped)
    assert [op.verb for op in log[length:]] == ["synchronize"]
    assert log[-1].event == last_store.event
    # What it shows may be read now, and not without that wait.
    entries = vars(recorded.swapped)["state"].values()
    host = [host_region_of(entry[key]) for entry in entries for key in ("exp_avg", "exp_avg_sq")]
    recorded.device.note_host_read(host)
    assert check_order(log) == []
    del log[length]
    assert check_order(log) != []


@pytest.mark.parametrize("packed", [True, False])
def test_times_are_those_of_one_update(packed: bool, twins: Callable[..., Any]) -> None:
    """A failed update leaves no times that mix it with the update before."""
    recorded = Recorded(twins, SHAPES, (packed, 3, 2))
    recorded.step()
    recorded.step()
    recorded.device.tamper = Tamper("copy_out", 1, RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        recorded.swapped.step()
    times = recorded.swapped.swap_report().last_step
    for batch in times.batches if times is not None else ():
        assert 0 <= batch.load_start <= batch.load_end <= batch.update_start
        assert batch.update_start <= batch.update_end <= batch.store_start <= batch.store_end
