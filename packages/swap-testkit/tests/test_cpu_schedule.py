# SPDX-License-Identifier: Apache-2.0
"""When the copies of a CpuAsDevice run: as the schedule says, and never against a wait."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swap_testkit.torch import CopySchedule, CpuAsDevice
from swap_torch import DeviceMemory, Transfer


class Ask(NamedTuple):
    """One call of a verb: ``copy``, ``record``, ``wait`` or ``synchronize``."""

    verb: str
    stream: str
    event: int = 0


Program = list[Ask]


def run(program: Program, device: CpuAsDevice) -> list[set[int]]:
    """Which copies have run after each call. A copy is known by its position in the program."""
    storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
    device.restore(DeviceMemory((storage,), (len(program),)))
    cells = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(program),), (1,)).zero_()
    one = torch.ones(1, dtype=torch.uint8)
    events = [device.create_event() for _ in range(3)]
    streams = {
        stream.name: stream
        for stream in (device.compute_stream(), device.load_stream, device.store_stream)
    }
    history = []
    for position, (verb, name, event) in enumerate(program):
        if verb == "copy":
            device.copy_in(streams[name], [Transfer(cells[position : position + 1], one)])
        elif verb == "record":
            device.record(events[event], streams[name])
        elif verb == "wait":
            device.wait(streams[name], events[event])
        else:
            device.synchronize(events[event])
        history.append(set(torch.nonzero(cells).flatten().tolist()))
    return history


def must_precede(program: Program) -> list[set[int]]:
    """For each call the copies that run before it on any device, whatever its timing."""
    latest: dict[str, set[int]] = {}
    recorded: dict[int, set[int]] = {}
    result = []
    for position, (verb, stream, event) in enumerate(program):
        before = set(latest.get(stream, ()))
        if verb in ("wait", "synchronize"):
            before |= recorded.get(event, set())
        result.append(before)
        if verb == "record":
            recorded[event] = before
        latest[stream] = before | {position} if verb == "copy" else before
    return result


STREAMS = st.sampled_from(["compute", "load", "store"])
ASKS = st.one_of(
    st.builds(Ask, st.just("copy"), STREAMS),
    st.builds(Ask, st.sampled_from(["record", "wait"]), STREAMS, st.integers(0, 2)),
    st.builds(Ask, st.just("synchronize"), st.just("host"), st.integers(0, 2)),
)
PROGRAMS = st.lists(ASKS, min_size=1, max_size=14)

CHAIN = [  # a load that follows a store, and what the compute stream needs of both
    Ask("copy", "store"),
    Ask("record", "store", 0),
    Ask("copy", "store"),
    Ask("wait", "load", 0),
    Ask("copy", "load"),
    Ask("record", "load", 1),
    Ask("copy", "load"),
    Ask("wait", "compute", 1),
]


def test_earliest_runs_every_copy_at_once() -> None:
    history = run(CHAIN, CpuAsDevice(schedule=CopySchedule.EARLIEST))
    assert history == [{0}, {0}, {0, 2}, {0, 2}, {0, 2, 4}, {0, 2, 4}, {0, 2, 4, 6}, {0, 2, 4, 6}]


def test_latest_runs_what_is_waited_for_through_the_other_stream_and_no_more() -> None:
    history = run(CHAIN, CpuAsDevice(schedule=CopySchedule.LATEST))
    assert history == [set()] * 7 + [{0, 4}]


def test_latest_runs_what_the_host_waits_for() -> None:
    program = [*CHAIN[:-1], Ask("synchronize", "host", 1)]
    assert run(program, CpuAsDevice(schedule=CopySchedule.LATEST))[-1] == {0, 4}


@pytest.mark.parametrize("verb", ["wait", "synchronize"])
def test_an_event_that_is_recorded_again_means_its_latest_place(verb: str) -> None:
    program = [
        Ask("copy", "load"),
        Ask("record", "load", 0),
        Ask("wait", "store", 0),  # the first place, also if the store stream comes to it later
        Ask("copy", "store"),
        Ask("copy", "load"),
        Ask("record", "load", 0),
        Ask("copy", "load"),
        Ask("record", "store", 1),
        Ask(verb, "compute", 1),
        Ask(verb, "compute", 0),
    ]
    history = run(program, CpuAsDevice(schedule=CopySchedule.LATEST))
    assert history[-3:] == [set(), {0, 3}, {0, 3, 4}]


@given(program=PROGRAMS, seed=st.integers(0, 3))
@example(program=CHAIN, seed=0)
@settings(deadline=None)
def test_every_schedule_obeys_the_waits_and_only_those(program: Program, seed: int) -> None:
    queued: set[int] = set()
    forced: set[int] = set()
    before = must_precede(program)
    histories = [
        run(program, CpuAsDevice(schedule=schedule, seed=seed)) for schedule in CopySchedule
    ]
    for position, (ask, *ran) in enumerate(zip(program, *histories, strict=True)):
        queued |= {position} if ask.verb == "copy" else set()
        if ask.stream in ("compute", "host"):
            forced |= before[position] | ({position} if ask.verb == "copy" else set())
        earliest, latest, at_random = ran
        assert earliest == queued
        assert latest == forced
        assert forced <= at_random <= queued
        for done in at_random:
            assert before[done] <= at_random, f"copy {done} ran before what it waits for"


def test_random_is_the_same_for_the_same_seed_and_different_for_others() -> None:
    program = [Ask("copy", stream) for stream in ("load", "store") * 4]

    def history(seed: int) -> list[set[int]]:
        return run(program, CpuAsDevice(schedule=CopySchedule.RANDOM, seed=seed))

    histories = [history(seed) for seed in range(80)]
    assert histories == [history(seed) for seed in range(80)]
    assert len({str(each) for each in histories}) > 10
    ends = [len(each[-1]) for each in histories]
    assert max(ends) == len(program), "sometimes nothing is late"
    assert min(ends) < len(program) - 1, "sometimes more than one copy is"
