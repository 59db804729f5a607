# SPDX-License-Identifier: Apache-2.0
"""Single calls of the device left out, one by one; and no alarm where nothing is left out."""

from __future__ import annotations

from typing import Any

import pytest

from swap_testkit import Op, Tamper, check_order
from swap_testkit.torch import CopySchedule

PIPELINES = pytest.mark.parametrize("packed", [True, False], ids=["packed", "tensor"])
BATCHES = 6


def planted_step(make_twins: Any, packed: bool, tamper: Tamper) -> Any:
    """A step as it should be, and one with a fault; events of the first are there to mislead."""
    twins = make_twins(packed=packed, poison=True)
    twins.step()
    twins.device.tamper = tamper
    twins.step(read=False)
    return twins


def calls(make_twins: Any, packed: bool, verb: str) -> list[Op]:
    """The calls of a verb in one step."""
    twins = make_twins(packed=packed)
    twins.step()
    begin = len(twins.device.log)
    twins.step(read=False)
    return [op for op in twins.device.log[begin:] if op.verb == verb]


@PIPELINES
def test_each_wait_that_is_left_out_is_reported(make_twins: Any, packed: bool) -> None:
    waits = calls(make_twins, packed, "wait")
    assert len(waits) == (2 + 2 * BATCHES + BATCHES - 2 if packed else 4 * BATCHES - 1)
    for nth, left_out in enumerate(waits):
        twins = planted_step(make_twins, packed, Tamper("wait", nth))
        found = check_order(twins.device.log)
        assert found, f"{left_out} (call {nth}) is left out and nothing is reported"
        assert left_out.stream in {each.later.stream for each in found}


@PIPELINES
def test_each_record_that_something_waits_for_is_reported(make_twins: Any, packed: bool) -> None:
    records = calls(make_twins, packed, "record")
    waited_for = {op.event for op in calls(make_twins, packed, "wait")}
    needed = [nth for nth, op in enumerate(records) if op.event in waited_for]
    assert len(needed) == len(waited_for)
    assert needed == [
        nth
        for nth in range(len(records))
        if check_order(planted_step(make_twins, packed, Tamper("record", nth)).device.log)
    ]


@PIPELINES
@pytest.mark.parametrize("verb", ["copy_in", "copy_out"])
def test_each_copy_that_is_left_out_shows_in_the_states_of_its_parameter(
    make_twins: Any, packed: bool, verb: str
) -> None:
    for nth in range(BATCHES):
        twins = make_twins(packed=packed, poison=True)
        twins.step()
        twins.device.tamper = Tamper(verb, nth)
        lost = f"parameter {twins.order()[nth]} of group 0: "
        with pytest.raises(AssertionError, match=rf"exp_avg(_sq)? of {lost}"):
            twins.step()
        assert twins.device.tamper.fired == 1
        assert check_order(twins.device.log) == [], "the log shows no missing copy"
        assert len(twins.miscounts()) == 1


@PIPELINES
def test_memory_that_is_not_taken_is_reported_by_the_copy(make_twins: Any, packed: bool) -> None:
    for nth in range(len(calls(make_twins, packed, "restore"))):
        with pytest.raises(RuntimeError, match="touches device memory that is freed"):
            planted_step(make_twins, packed, Tamper("restore", nth))


@PIPELINES
def test_memory_that_is_not_given_back_is_held(make_twins: Any, packed: bool) -> None:
    for nth in range(len(calls(make_twins, packed, "release"))):
        twins = planted_step(make_twins, packed, Tamper("release", nth))
        assert twins.inner.held_bytes > 0
        assert twins.miscounts()[0].startswith("held ")


@PIPELINES
def test_a_host_read_without_a_wait_is_reported(make_twins: Any, packed: bool) -> None:
    twins = make_twins(packed=packed)
    twins.device.tamper = Tamper("synchronize", 0)
    twins.step()
    assert {str(each.later) for each in check_order(twins.device.log)} == {"host_read on host"}


@PIPELINES
@pytest.mark.parametrize("poison", [True, False], ids=["poison", "freed"])
@pytest.mark.parametrize("seed", range(10))
def test_five_random_updates_of_a_sound_optimizer_raise_no_alarm(
    make_twins: Any, packed: bool, poison: bool, seed: int
) -> None:
    twins = make_twins(packed=packed, poison=poison, schedule=CopySchedule.RANDOM, seed=seed)
    for _ in range(4):
        twins.step(read=False)
    twins.step()
    assert check_order(twins.device.log) == []
    assert twins.miscounts() == []


@PIPELINES
def test_some_random_schedules_find_a_missing_wait(make_twins: Any, packed: bool) -> None:
    waits = calls(make_twins, packed, "wait")
    last = max(nth for nth, op in enumerate(waits) if op.stream == "compute")

    def finds(seed: int) -> bool:
        twins = make_twins(packed=packed, schedule=CopySchedule.RANDOM, seed=seed)
        twins.device.tamper = Tamper("wait", last)  # memory is released with stores in flight
        try:
            twins.step()
        except RuntimeError:
            return True
        return False

    assert 0 < sum(map(finds, range(20))) < 20
