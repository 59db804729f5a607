# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import Ledger, StateReport, StayReason, StepTimes, SwapReport, format_bytes

MIB = 2**20
UNITS = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}


def state(nbytes: int, stays: StayReason | None = None, *, born: bool = True) -> StateReport:
    return StateReport(
        owner="group 0, parameter 0 (weight)",
        key="exp_avg",
        shape=(nbytes // 4,),
        dtype="float32",
        nbytes=nbytes,
        stays=stays,
        born=born,
    )


REPORT = SwapReport(
    optimizer="torch.optim.AdamW",
    packed=True,
    states=(
        state(3 * MIB),
        state(5 * MIB),
        state(7 * MIB, born=False),
        state(2 * MIB, StayReason.SHARES_STORAGE),
        state(1024, StayReason.TOO_SMALL),
        state(2048, StayReason.TOO_SMALL),
        state(4096, StayReason.TOO_SMALL, born=False),
    ),
    batches=3,
    batch_bytes=(2 * MIB, 4 * MIB, 2 * MIB),
    pinned=True,
    ledger=Ledger(
        updates=5,
        bytes_loaded=40 * MIB,
        bytes_stored=39 * MIB,
        host_bytes=9 * MIB,
        device_bytes=512,
        peak_device_bytes=6 * MIB,
    ),
    last_step=StepTimes(
        total=0.0125,
        load=0.004,
        update=0.00525,
        meanwhile=0.0,
        store=0.003,
        wait=0.00725,
        batches=(),
    ),
)


def test_sums_the_states_that_exist_by_where_they_are() -> None:
    assert REPORT.swapped_bytes == (3 + 5) * MIB
    assert REPORT.resident_bytes == 2 * MIB + 1024 + 2048


def test_shows_master_parameters_apart_where_there_are_some() -> None:
    masters = (
        replace(state(3 * MIB), key="master_param"),
        replace(state(1 * MIB, StayReason.MASTER), key="master_param"),
    )
    report = replace(REPORT, states=(*REPORT.states, *masters))
    assert report.master_bytes == (3 * MIB, 1 * MIB)
    assert "  masters    3.0 MiB of these swap, 1.0 MiB stay" in str(report).splitlines()
    assert REPORT.master_bytes == (0, 0)
    assert "masters" not in str(REPORT)


def test_takes_held_memory_from_the_ledger() -> None:
    ledger = REPORT.ledger
    assert REPORT.host_bytes == ledger.host_bytes
    assert REPORT.idle_device_bytes == ledger.device_bytes
    assert REPORT.peak_device_bytes == ledger.peak_device_bytes


def test_counts_the_states_that_stay_by_reason() -> None:
    assert REPORT.stay_counts() == {StayReason.SHARES_STORAGE: 1, StayReason.TOO_SMALL: 3}


def test_prints_every_number_with_its_meaning() -> None:
    assert str(REPORT).splitlines() == [
        "torch.optim.AdamW, packed swap",
        "  swapped    2 states exist of 3 that swap, 8.0 MiB of values",
        "  host       9.0 MiB (pinned)",
        "  device     idle 512 B, peak 6.0 MiB, states that stay 2.0 MiB",
        "  batches    3, largest 4.0 MiB",
        "  moved      40.0 MiB in, 39.0 MiB out, in 5 updates",
        "  stays      1 of the states: it shares its storage with other tensors",
        "  stays      3 of the states: it has fewer elements than min_numel",
        "  last step  12.50 ms: load 4.00, update 5.25, store 3.00, "
        "states that stay 0.00, compute waited 7.25",
    ]


def test_prints_that_it_swaps_per_tensor_and_that_memory_is_pageable() -> None:
    lines = str(replace(REPORT, packed=False, pinned=False)).splitlines()
    assert lines[0] == "torch.optim.AdamW, per tensor swap"
    assert lines[2].endswith("(pageable)")


def test_prints_a_report_of_nothing() -> None:
    empty = replace(REPORT, states=(), batches=0, batch_bytes=(), ledger=Ledger(), last_step=None)
    assert str(empty).splitlines()[1:] == [
        "  swapped    0 states exist of 0 that swap, 0 B of values",
        "  host       0 B (pinned)",
        "  device     idle 0 B, peak 0 B, states that stay 0 B",
        "  batches    0, largest 0 B",
        "  moved      0 B in, 0 B out, in 0 updates",
    ]


def test_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError, match="packed"):
        REPORT.packed = False  # type: ignore[misc]


@pytest.mark.parametrize("reason", StayReason)
def test_gives_each_reason_as_a_sentence_about_the_state(reason: StayReason) -> None:
    assert reason.value.startswith(("it ", "its "))
    report = replace(REPORT, states=(state(4, reason),))
    assert f"1 of the states: {reason.value}" in str(report)


def test_remembers_the_peak_of_what_is_held() -> None:
    ledger = Ledger()
    ledger.hold(10)
    ledger.hold(20)
    ledger.drop(10)
    ledger.hold(5)
    assert (ledger.restores, ledger.device_bytes, ledger.peak_device_bytes) == (3, 20 + 5, 10 + 20)


@given(st.integers(0, 2**60))
@settings(deadline=None)
def test_writes_bytes_to_within_half_a_tenth_of_the_unit(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    # Half a tenth, and a little for binary fractions that are not exact.
    tolerance = 0 if unit == "B" else 0.0501
    assert abs(float(number) - nbytes / UNITS[unit]) <= tolerance
    assert float(number) >= 1 or nbytes == 0
    assert float(number) <= 1024 or unit == "TiB"


@pytest.mark.parametrize(("unit", "factor"), UNITS.items())
def test_goes_to_the_next_unit_at_1024(unit: str, factor: int) -> None:
    assert format_bytes(factor) == ("1 B" if unit == "B" else f"1.0 {unit}")
    assert format_bytes(1023 * factor) == (f"1023 {unit}" if unit == "B" else f"1023.0 {unit}")


def test_writes_the_sign_of_a_difference() -> None:
    assert format_bytes(-3 * MIB) == "-3.0 MiB"


def test_never_writes_1024_of_a_unit_that_has_a_larger_one() -> None:
    assert format_bytes(MIB - 1) == "1.0 MiB"
