# SPDX-License-Identifier: Apache-2.0
"""Each known fault of an update that is one of order, planted: the checker reports it.

In every schedule, also in those in which the results are right. The table has the first report: the
access that is not waited for, and the one that does not wait.

| fault                              | pipeline | earlier              | later        | access |
| ---------------------------------- | -------- | -------------------- | ------------ | ------ |
| load does not wait for memory      | both     | memory is used again | load         | writes |
| update does not wait for its load  | both     | load                 | lerp         | writes |
| update waits for another load      | both     | load                 | lerp         | writes |
| store does not wait for its update | both     | memory is used again | store        | reads  |
| load does not wait for the arena   | packed   | lerp                 | load         | writes |
| release does not wait for a store  | both     | store                | free         | frees  |
| last release waits for no store    | both     | store                | free         | frees  |
| host does not wait for stores      | both     | store                | clone        | reads  |
| memory is not recorded             | both     | memory is used again | load         | writes |
| load is not recorded               | both     | load                 | lerp         | writes |
| load is recorded too early         | both     | load                 | lerp         | writes |
| update is not recorded             | both     | memory is used again | store        | reads  |
| update is recorded too early       | both     | lerp                 | store        | reads  |
| store is not recorded              | packed   | lerp                 | load         | writes |
| store is not recorded              | tensor   | store                | free         | frees  |
| store is recorded too early        | packed   | store                | load         | writes |
| store is recorded too early        | tensor   | store                | free         | frees  |
| memory is released before the wait | both     | store                | free         | frees  |
| next load comes before the store   | packed   | lerp                 | load         | writes |
| store is queued before its update  | both     | memory is used again | store        | reads  |
| batch is stored and never updated  | both     | memory is used again | store        | reads  |

Faults that are not of order are for other instruments (../test_planted_faults.py), but use of
memory that is not there raises here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch

from swap_core import StateLostError, SwapInternalError
from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Schedule
from swap_torch.device import AcceleratorDevice, Transfer

NAMES = {"copy_ (host to device)": "load", "copy_ (device to host)": "store"}
PIPELINES = {"packed": ("packed",), "tensor": ("tensor",), "both": ("packed", "tensor")}
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in str(__doc__).splitlines()
    if line.startswith("| ")
][2:]
CASES = [
    pytest.param(fault, pipeline, cells, id=f"{fault}, {pipeline}")
    for fault, where, *cells in TABLE
    for pipeline in PIPELINES[where]
]


@pytest.mark.parametrize(("fault", "pipeline", "cells"), CASES)
def test_a_fault_is_reported_in_every_schedule(
    fault: str,
    pipeline: str,
    cells: list[str],
    schedule: Schedule,
    pipelines: ModuleType,
    planted: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted.plant(monkeypatch, fault)
    assert first_report(pipelines.Twins(packed=pipeline == "packed")) == cells


def test_host_memory_that_is_written_while_a_load_reads_it(
    schedule: Schedule, pipelines: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AcceleratorDevice.copy_in

    def load_and_write(
        self: AcceleratorDevice, stream: torch.Stream, transfers: Sequence[Transfer]
    ) -> None:
        load(self, stream, transfers)
        for transfer in transfers:
            transfer.host.bitwise_or_(0)  # the same values: only the checker can tell

    monkeypatch.setattr(AcceleratorDevice, "copy_in", load_and_write)
    assert first_report(pipelines.Twins()) == ["load", "bitwise_or_", "writes"]


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("memory is released before a store", StateLostError, "could not be stored"),
        ("memory is not taken", RuntimeError, "used while its storage is freed"),
    ],
)
def test_use_of_memory_that_is_not_there_raises(
    fault: str,
    error: type[Exception],
    words: str,
    schedule: Schedule,
    pipelines: ModuleType,
    planted: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted.plant(monkeypatch, fault)
    with pytest.raises(error, match=words):
        pipelines.Twins().run()


def first_report(twins: Any) -> list[str]:
    """The table's last columns, after three updates and a look at the states."""
    # Wrong results, in schedules with bad luck; or a batch refuses the move.
    with suppress(AssertionError, SwapInternalError):
        twins.run()
    torch.accelerator.synchronize()
    races = simulator.races()
    assert races
    first = races[0]
    return [*(NAMES.get(name, name) for name in (first.earlier, first.operation)), first.access]
