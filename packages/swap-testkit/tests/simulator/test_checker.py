# SPDX-License-Identifier: Apache-2.0
"""The happens-before checker: it must find the same in every schedule, and nothing else."""

from __future__ import annotations

import pytest
import torch

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Schedule

DEVICE = "simnpu"


class Streams:
    """A default stream, a side stream, and tensors that both may use."""

    def __init__(self) -> None:
        self.main = torch.accelerator.current_stream()
        self.side = torch.Stream(device=DEVICE)
        self.values = torch.zeros(64, device=DEVICE)
        self.host = torch.zeros(64).pin_memory()
        torch.accelerator.synchronize()

    def hand_over(self) -> None:
        """Let the side stream wait for the main one."""
        self.side.wait_stream(self.main)

    def take_back(self) -> None:
        """Let the main stream wait for the side one."""
        self.main.wait_stream(self.side)

    def store(self) -> None:
        """Copy to the host on the side stream."""
        with self.side:
            self.host.copy_(self.values, non_blocking=True)

    def load(self) -> None:
        """Copy to the device on the side stream."""
        with self.side:
            self.values.copy_(self.host, non_blocking=True)


def found() -> list[tuple[str, str, str]]:
    return [(race.earlier, race.operation, race.access) for race in simulator.races()]


STORE, LOAD = "copy_ (device to host)", "copy_ (host to device)"


def test_in_order_nothing_is_reported(schedule: Schedule) -> None:
    streams = Streams()
    for _ in range(3):
        streams.values.add_(1)
        streams.hand_over()
        streams.store()
        streams.take_back()
        streams.values.mul_(2)
        streams.side.synchronize()
        streams.host.add_(1)
        streams.hand_over()
        streams.load()
        streams.take_back()
    assert streams.values.sum().item() == 64 * 3 * 2
    assert found() == []


def test_a_store_that_does_not_wait_for_its_values(schedule: Schedule) -> None:
    streams = Streams()
    streams.values.add_(1)
    streams.store()
    (race,) = simulator.races()
    assert race.earlier == "add"
    assert race.operation == STORE
    assert race.access == "reads"
    assert race.bytes == "0:256"
    assert race.memory.startswith("device block ")
    assert race.memory.endswith("(256 bytes)")
    assert race.earlier_where == "the default stream of device 0"
    assert race.where.startswith("stream ")
    assert race.missing == (
        f"{race.where} does not wait for the default stream of device 0 after add "
        f"(record an event there and wait for it)"
    )
    assert str(race).startswith(f"{STORE} on {race.where} reads device block")


def test_values_that_change_while_they_are_stored(schedule: Schedule) -> None:
    streams = Streams()
    streams.hand_over()
    streams.store()
    streams.values.add_(1)
    assert found() == [(STORE, "add", "writes")]


def test_values_that_are_used_before_they_are_loaded(schedule: Schedule) -> None:
    streams = Streams()
    streams.load()
    _ = streams.values + 1
    assert found() == [(LOAD, "add", "reads")]


def test_an_event_that_is_recorded_too_early(schedule: Schedule) -> None:
    streams = Streams()
    event = torch.Event(device=DEVICE)
    event.record(streams.side)
    streams.load()
    streams.main.wait_event(event)
    streams.values.add_(1)
    assert found() == [(LOAD, "add", "writes")]


def test_an_event_that_is_recorded_anew_means_the_latest_place(schedule: Schedule) -> None:
    streams = Streams()
    event = torch.Event(device=DEVICE)
    event.record(streams.side)
    streams.load()
    event.record(streams.side)
    streams.main.wait_event(event)
    streams.values.add_(1)
    assert found() == []


def test_order_is_passed_on(schedule: Schedule) -> None:
    streams, third = Streams(), torch.Stream(device=DEVICE)
    streams.load()
    third.wait_stream(streams.side)
    streams.main.wait_stream(third)
    streams.values.add_(1)
    assert found() == []


@pytest.mark.parametrize("how", ["event", "stream", "device", "item", "query"])
def test_the_host_orders_what_it_waited_for(schedule: Schedule, how: str) -> None:
    streams, event = Streams(), torch.Event(device=DEVICE)
    streams.load()
    event.record(streams.side)
    if how == "event":
        event.synchronize()
    elif how == "stream":
        streams.side.synchronize()
    elif how == "device":
        torch.accelerator.synchronize()
    elif how == "item":
        with streams.side:
            streams.values[0].item()
    else:
        while not event.query():
            pass
    streams.values.add_(1)
    streams.host.add_(1)
    assert found() == []


def test_a_host_wait_for_one_stream_says_nothing_of_another(schedule: Schedule) -> None:
    streams = Streams()
    streams.load()
    streams.main.synchronize()
    streams.values.add_(1)
    assert found() == [(LOAD, "add", "writes")]


def test_the_host_reads_before_the_store_is_done(schedule: Schedule) -> None:
    streams = Streams()
    streams.store()
    _ = streams.host.clone()
    (race,) = simulator.races()
    assert (race.earlier, race.where, race.access) == (STORE, "the host", "reads")
    assert race.memory.startswith("pinned block ")
    assert "the host does not wait for stream" in race.missing


def test_the_host_writes_while_a_load_reads(schedule: Schedule) -> None:
    streams = Streams()
    streams.load()
    _ = streams.host.clone()  # two readers are no race
    assert found() == []
    streams.host.zero_()
    assert found() == [(LOAD, "zero_", "writes")]


def test_views_through_dlpack_are_the_same_memory(schedule: Schedule) -> None:
    streams = Streams()
    other = torch.from_dlpack(streams.host)
    streams.store()
    _ = other.sum()
    assert found() == [(STORE, "sum", "reads")]


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.view(8, 8).t()[1:3].unsqueeze(0),
        lambda t: t.is_pinned(),
        lambda t: (t.shape, t.stride(), t.numel(), t.detach()),
        lambda t: torch.empty_like(t),
        lambda t: torch.zeros_like(t),
        lambda t: t.untyped_storage(),
    ],
    ids=["views", "is_pinned", "geometry", "empty_like", "zeros_like", "storage"],
)
def test_looking_at_no_values_is_no_access(look: object) -> None:
    streams = Streams()
    streams.store()
    look(streams.host)  # type: ignore[operator]
    assert found() == []


def test_what_torch_does_not_see_can_be_told(schedule: Schedule) -> None:
    streams = Streams()
    streams.store()
    streams.host.numpy().sum()
    assert found() == []
    simulator.host_read(streams.host)
    assert found() == [(STORE, "host_read", "reads")]
    streams.load()
    simulator.host_write(streams.host[8:])
    assert found() == [(LOAD, "host_write", "writes")]


def test_other_bytes_of_a_block_are_other_memory(schedule: Schedule) -> None:
    streams = Streams()
    with streams.side:
        streams.host[:32].copy_(streams.values[:32], non_blocking=True)
    streams.values[32:].add_(1)
    streams.host[32:].add_(1)
    assert found() == []
    streams.values[31:].add_(1)
    streams.host[31:].add_(1)
    assert found() == [(STORE, "add", "writes"), (STORE, "add_", "writes")]


def test_memory_that_is_freed_too_early(schedule: Schedule) -> None:
    streams = Streams()
    with simulator.strict_free():
        streams.hand_over()
        streams.store()
        streams.values.untyped_storage().resize_(0)
        (race,) = simulator.races()
        assert (race.earlier, race.operation, race.access) == (STORE, "free", "frees")
        streams.take_back()
        torch.empty(64, device=DEVICE)
    assert found() == []


def test_memory_that_is_freed_in_order(schedule: Schedule) -> None:
    streams = Streams()
    with simulator.strict_free():
        streams.hand_over()
        streams.store()
        streams.take_back()
        streams.values.untyped_storage().resize_(0)
    assert found() == []


def test_a_race_can_raise_where_it_is_queued(schedule: Schedule) -> None:
    streams = Streams()
    streams.load()
    with simulator.raise_on_race(), pytest.raises(RuntimeError, match="a race: add on the default"):
        streams.values.add_(1)
    assert len(simulator.races()) == 1


def test_reports_are_kept_until_they_are_cleared() -> None:
    streams = Streams()
    streams.load()
    streams.values.add_(1)
    assert len(simulator.races(clear=False)) == simulator.race_count() == 1
    assert len(simulator.races()) == 1
    assert simulator.races() == []
    assert simulator.race_count() == 0


def test_two_devices_do_not_order_each_other(schedule: Schedule) -> None:
    first = torch.ones(8, device=f"{DEVICE}:0")
    second = torch.zeros(8, device=f"{DEVICE}:1")
    second.copy_(first)
    assert second.sum().item() == 8
    assert found() == []
