# SPDX-License-Identifier: Apache-2.0
"""Each known fault of a swapped update, planted, and the instruments that report it.

The table is what the tests expect. The instruments:

- *order*: ``check_order`` on the log. It needs no bad luck: the results of this run may be right.
  The table has the verbs of the first pair of accesses that it finds.
- *EARLIEST*, *LATEST*: ``CpuAsDevice`` with that schedule and poison. ``bits``: parameters, states
  or counters differ (``assert_same_bits``). ``freed``: a copy touches freed memory. ``guard``: a
  batch refuses a move that does not follow from where it is.
- *counts*: device bytes, copies and waits of the host against a formula, if the update came
  through.

A dot: not reported. What it shows of the instruments:

- On ``CpuAsDevice`` the compute stream is the host. So an update cannot be late there, and what it
  waited for the host has too: a store or a host read that waits for too little shows in the log
  only.
- The log knows orders, not places: use of freed memory in a proper order shows on the device only.
- An update that is right but waits needlessly is reported by none of them. Time is what
  ``swap_core.VirtualDevice`` is for.

| fault                              | pipeline | order               | EARLIEST | LATEST | counts |
| ---------------------------------- | -------- | ------------------- | -------- | ------ | ------ |
| nothing                            | both     | .                   | .        | .      | .      |
| load does not wait for memory      | both     | restore, copy_in    | .        | .      | .      |
| update does not wait for its load  | both     | copy_in, update     | .        | bits   | .      |
| update waits for another load      | both     | copy_in, update     | .        | bits   | .      |
| store does not wait for its update | both     | restore, copy_out   | .        | .      | .      |
| load does not wait for the arena   | packed   | update, copy_in     | .        | bits   | .      |
| release does not wait for a store  | both     | copy_out, release   | .        | freed  | .      |
| last release waits for no store    | both     | copy_out, release   | .        | freed  | .      |
| host does not wait for stores      | both     | copy_out, host_read | .        | .      | .      |
| memory is not recorded             | both     | restore, copy_in    | .        | .      | .      |
| load is not recorded               | both     | copy_in, update     | .        | bits   | .      |
| load is recorded too early         | both     | copy_in, update     | .        | bits   | .      |
| update is not recorded             | both     | restore, copy_out   | .        | .      | .      |
| update is recorded too early       | both     | update, copy_out    | .        | .      | .      |
| store is not recorded              | packed   | update, copy_in     | .        | freed  | .      |
| store is not recorded              | tensor   | copy_out, release   | .        | freed  | .      |
| store is recorded too early        | packed   | copy_out, copy_in   | .        | freed  | .      |
| store is recorded too early        | tensor   | copy_out, release   | .        | freed  | .      |
| memory is released before the wait | both     | copy_out, release   | .        | freed  | .      |
| memory is released before a store  | both     | release, copy_out   | freed    | freed  | .      |
| next load comes before the store   | packed   | update, copy_in     | bits     | bits   | .      |
| store is queued before its update  | both     | restore, copy_out   | bits     | .      | .      |
| batch is stored and never updated  | both     | restore, copy_out   | guard    | guard  | .      |
| memory is not taken                | both     | .                   | freed    | freed  | .      |
| memory is not given back           | both     | .                   | .        | .      | counts |
| memory of all batches at once      | tensor   | .                   | .        | .      | counts |
| nothing is loaded                  | both     | .                   | bits     | bits   | counts |
| nothing is stored                  | both     | .                   | bits     | bits   | counts |
| everything is loaded twice         | both     | .                   | .        | .      | counts |
| host waits for each store          | both     | .                   | .        | .      | counts |
| next update waits for each store   | both     | .                   | .        | .      | .      |
| store is queued on the load stream | both     | restore, release    | .        | freed  | .      |
| counter advances twice             | both     | .                   | bits     | bits   | .      |
| one ulp of one parameter           | both     | .                   | bits     | bits   | .      |
| another implementation             | both     | .                   | bits     | bits   | .      |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from swap_core import SwapInternalError
from swap_testkit import check_order
from swap_testkit.torch import CopySchedule

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
def test_a_fault_is_reported_by_these_instruments(
    fault: str,
    pipeline: str,
    cells: list[str],
    planted: ModuleType,
    make_twins: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted.plant(monkeypatch, fault)

    twins = make_twins(packed=pipeline == "packed", poison=True)
    earliest = outcome(twins)
    found = check_order(twins.device.log)
    order = f"{found[0].earlier.verb}, {found[0].later.verb}" if found else "."
    counts = "counts" if earliest in (".", "bits") and twins.miscounts() else "."
    late = make_twins(packed=pipeline == "packed", poison=True, schedule=CopySchedule.LATEST)

    assert [order, earliest, outcome(late), counts] == cells


def outcome(twins: Any) -> str:
    """How three updates end, in a word of the table."""
    try:
        for _ in range(3):
            twins.step()
    except AssertionError:
        return "bits"
    except SwapInternalError:
        return "guard"
    except RuntimeError as error:
        return "freed" if "touches device memory that is freed" in str(error) else repr(error)
    return "."


def test_every_fault_is_in_the_table(planted: ModuleType) -> None:
    assert {fault for fault, *_ in TABLE} == set(planted.FAULTS)


def test_what_no_instrument_reports_is_right_but_slow() -> None:
    silent = {fault for fault, _, *cells in TABLE if set(cells) == {"."}}
    assert silent == {
        "nothing",
        "next update waits for each store",
    }
