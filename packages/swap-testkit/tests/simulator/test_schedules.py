# SPDX-License-Identifier: Apache-2.0
"""When work runs, and what the host gets to know of it."""

from __future__ import annotations

import time

import pytest
import torch

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Link, Schedule

DEVICE = "simnpu"


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def raw(tensor: torch.Tensor) -> list[float]:
    """What is in host memory now, by a way that the checker does not see."""
    return tensor.numpy().tolist()


def two_stores() -> tuple[torch.Tensor, torch.Tensor]:
    """Queue a store on the default stream and one on a side stream; tell the host's memory."""
    side = torch.Stream(device=DEVICE)
    ones, twos = torch.ones(1, device=DEVICE), torch.full((1,), 2.0, device=DEVICE)
    torch.accelerator.synchronize()
    on_default, on_side = pinned(0), pinned(0)
    on_default.copy_(ones, non_blocking=True)
    with side:
        on_side.copy_(twos, non_blocking=True)
    return on_default, on_side


@pytest.mark.parametrize(
    ("schedule", "default", "side"),
    [
        (Schedule.EARLIEST, [1.0], [2.0]),
        (Schedule.LATEST, [0.0], [0.0]),
        (Schedule.SIDE_STREAMS_FIRST, [0.0], [2.0]),
    ],
)
def test_what_has_run_before_anybody_waits(
    schedule: Schedule, default: list[float], side: list[float]
) -> None:
    simulator.set_schedule(schedule)
    on_default, on_side = two_stores()
    assert (raw(on_default), raw(on_side)) == (default, side)
    torch.accelerator.synchronize()
    assert (raw(on_default), raw(on_side)) == ([1.0], [2.0])


def test_random_draws_every_outcome_and_a_seed_repeats_its_own() -> None:
    def outcome(seed: int) -> tuple[list[float], list[float]]:
        simulator.set_schedule(Schedule.EARLIEST)
        simulator.set_schedule(Schedule.RANDOM, seed=seed)
        on_default, on_side = two_stores()
        seen = raw(on_default), raw(on_side)
        torch.accelerator.synchronize()
        return seen

    outcome(0)  # memory that is used again is one task more
    outcomes = [outcome(seed) for seed in range(40)]
    assert {(a[0], b[0]) for a, b in outcomes} == {(0, 0), (1, 0), (0, 2), (1, 2)}
    assert [outcome(seed) for seed in range(40)] == outcomes


def test_threads_run_while_the_host_goes_on() -> None:
    simulator.set_schedule(Schedule.THREADS, link=Link(latency=0.2))
    source, target = torch.ones(8, device=DEVICE), torch.zeros(8).pin_memory()
    begun = time.perf_counter()
    target.copy_(source, non_blocking=True)
    queued = time.perf_counter() - begun
    assert raw(target) == [0.0] * 8
    torch.accelerator.synchronize()
    assert raw(target) == [1.0] * 8
    assert queued < 0.1 < 0.2 <= time.perf_counter() - begun


def test_the_link_carries_one_transfer_in_each_direction() -> None:
    simulator.set_schedule(Schedule.THREADS, link=Link(to_device=4e5, to_host=4e5))
    here = [torch.zeros(10_000).pin_memory() for _ in range(4)]
    there = [torch.zeros(10_000, device=DEVICE) for _ in range(4)]
    streams = [torch.Stream(device=DEVICE) for _ in range(4)]
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    for number, stream in enumerate(streams):
        with stream:
            if number < 2:  # 0.1 s each
                there[number].copy_(here[number], non_blocking=True)
            else:
                here[number].copy_(there[number], non_blocking=True)
    torch.accelerator.synchronize()
    assert 0.2 <= time.perf_counter() - begun < 0.35


def test_a_link_needs_threads() -> None:
    with pytest.raises(ValueError, match=r"link needs Schedule\.THREADS"):
        simulator.set_schedule(Schedule.LATEST, link=Link(latency=1))


def test_waits_are_respected(schedule: Schedule) -> None:
    side, event = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    values = torch.zeros(1, device=DEVICE)
    for _ in range(20):
        values.add_(1)
        event.record()
        side.wait_event(event)
        with side:
            values.mul_(2)
            event.record()
        torch.accelerator.current_stream().wait_event(event)
    assert values.item() == 2.0 * (2**20 - 1)


def test_polling_ends(schedule: Schedule) -> None:
    event, values = torch.Event(device=DEVICE), torch.zeros(1, device=DEVICE)
    for _ in range(10):
        values.add_(1)
    event.record()
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 1_000_000
    assert torch.accelerator.current_stream().query()


def test_errors_come_at_the_next_synchronisation(schedule: Schedule) -> None:
    table = torch.zeros(3, 2, device=DEVICE)
    index = torch.tensor([7]).to(DEVICE)
    torch.accelerator.synchronize()
    torch.nn.functional.embedding(index, table)
    with pytest.raises(RuntimeError, match="queued earlier failed: index_select on the default"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_events_take_the_time(schedule: Schedule) -> None:
    start, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(1000, device=DEVICE).exp_()
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 10_000


def test_elapsed_time_needs_events_that_take_it() -> None:
    start, end = torch.Event(device=DEVICE), torch.Event(device=DEVICE)
    start.record()
    end.record()
    end.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(end)


def test_an_event_that_was_never_recorded_holds_nobody_up(schedule: Schedule) -> None:
    event = torch.Event(device=DEVICE)
    torch.accelerator.current_stream().wait_event(event)
    event.synchronize()
    assert event.query()


def test_streams_wrap_around_after_32() -> None:
    streams = [torch.Stream(device=DEVICE) for _ in range(33)]
    assert streams[0] == streams[32]
    assert len({stream.stream_id for stream in streams}) == 32


def test_the_current_stream_is_the_threads_own() -> None:
    from threading import Thread

    seen = []
    with torch.Stream(device=DEVICE):
        thread = Thread(target=lambda: seen.append(torch.accelerator.current_stream().stream_id))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream().stream_id != 0
    assert seen == [0]


@pytest.mark.parametrize("seed", range(3))
def test_host_threads_may_work_at_once(seed: int) -> None:
    from threading import Thread

    simulator.set_schedule([Schedule.THREADS, Schedule.LATEST, Schedule.RANDOM][seed], seed=seed)
    sums: list[float] = []

    def work() -> None:
        values = torch.ones(64, device=DEVICE)
        host = torch.zeros(64).pin_memory()
        for _ in range(50):
            values = values + 1
            host.copy_(values, non_blocking=True)
            torch.accelerator.current_stream().synchronize()
            host.untyped_storage().copy_(values.untyped_storage(), non_blocking=False)
        sums.append(host.sum().item())

    threads = [Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [64 * 51.0] * 3
