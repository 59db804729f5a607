# SPDX-License-Identifier: Apache-2.0
"""Memory, copies and events of the CPU in the role of a device. Schedules: test_cpu_schedule.py."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_core import HostRounding, SwapOptimizerConfig, align
from swap_testkit.torch import CopySchedule, CpuAsDevice
from swap_torch import DeviceMemory, Transfer, swap_optimizer

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def new_memory(*sizes: int) -> DeviceMemory:
    """Storages without bytes."""
    storages = [torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in sizes]
    return DeviceMemory(tuple(storages), sizes)


def view(memory: DeviceMemory, dtype: torch.dtype = torch.uint8, number: int = 0) -> torch.Tensor:
    """All of one storage, which must have its bytes."""
    shape = (memory.sizes[number] // dtype.itemsize,)
    return torch.empty(0, dtype=dtype).set_(memory.storages[number], 0, shape, (1,))


def held_sizes(memory: DeviceMemory) -> list[int]:
    """The bytes that each storage has now."""
    return [storage.nbytes() for storage in memory.storages]


# Memory.


def test_memory_is_taken_and_really_freed() -> None:
    device, memory = CpuAsDevice(), new_memory(64, 192)

    device.restore(memory)
    assert held_sizes(memory) == [64, 192]
    assert device.held_bytes == device.peak_bytes == 64 + 192

    device.release(memory)
    assert held_sizes(memory) == [0, 0]
    assert device.held_bytes == 0
    assert device.peak_bytes == 64 + 192


@pytest.mark.parametrize("poison", [False, True])
def test_restore_and_release_twice_count_once(poison: bool) -> None:
    device, memory = CpuAsDevice(poison=poison), new_memory(64)
    device.restore(memory)
    view(memory).fill_(7)
    device.restore(memory)
    assert device.held_bytes == device.peak_bytes == 64
    assert view(memory).tolist() == [7] * 64, "memory that is held keeps its values"
    device.release(memory)
    device.release(memory)
    assert device.held_bytes == 0


@given(
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=4),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12),
    poison=st.booleans(),
)
@settings(deadline=None)
def test_bytes_are_the_sum_of_what_is_held(
    sizes: list[int], calls: list[tuple[bool, int]], poison: bool
) -> None:
    device, held, peak = CpuAsDevice(poison=poison), set(), 0
    memories = [new_memory(size, 2 * size) for size in sizes]
    for take, number in calls:
        number %= len(sizes)
        (device.restore if take else device.release)(memories[number])
        (held.add if take else held.discard)(number)
        expected = sum(3 * sizes[i] for i in held)
        peak = max(peak, expected)
        assert (device.held_bytes, device.peak_bytes) == (expected, peak)
    if not poison:
        assert [sum(held_sizes(memory)) for memory in memories] == [
            3 * size if number in held else 0 for number, size in enumerate(sizes)
        ]


def test_over_the_limit_nothing_is_taken() -> None:
    device = CpuAsDevice(limit=1000)
    first, second = new_memory(400), new_memory(300, 301)
    device.restore(first)

    message = r"^CpuAsDevice: 601 bytes wanted, 400 held, limit 1,000$"
    with pytest.raises(torch.OutOfMemoryError, match=message) as caught:
        device.restore(second)

    assert type(caught.value) is device.out_of_memory
    assert held_sizes(second) == [0, 0]
    assert (device.held_bytes, device.peak_bytes) == (400, 400)
    device.release(first)
    device.restore(second)
    assert device.held_bytes == 601


def test_the_limit_itself_is_allowed_and_held_bytes_are_not_wanted_again() -> None:
    device, memory = CpuAsDevice(limit=256), new_memory(64, 192)
    device.restore(memory)
    device.restore(memory)
    assert device.held_bytes == 256


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_is_nan_before_the_load_and_after_the_release(dtype: torch.dtype) -> None:
    device, memory = CpuAsDevice(poison=True), new_memory(64)
    device.restore(memory)
    values = view(memory, dtype)
    assert values.isnan().all()
    values.fill_(1.0)
    device.release(memory)
    assert held_sizes(memory) == [64], "not really freed, so that it can be read"
    assert values.isnan().all()
    values.fill_(1.0)
    device.restore(memory)
    assert values.isnan().all()


def test_host_bytes_count_until_the_last_view_is_gone() -> None:
    device = CpuAsDevice()
    block, other = device.allocate_host(96), device.allocate_host(32)
    assert (block.shape, block.dtype, block.device.type) == ((96,), torch.uint8, "cpu")
    assert not block.any()
    assert device.host_bytes == 96 + 32

    part = block[8:16].view(torch.float32)
    del block
    assert device.host_bytes == 96 + 32
    del part
    assert device.host_bytes == 32
    del other
    assert (device.host_bytes, device.host_allocations) == (0, 2)
    assert device.host_rounding is HostRounding.EXACT


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_of_an_optimizer(packed: bool) -> None:
    numels, device = [300, 200, 500, 400], CpuAsDevice()
    params = [torch.nn.Parameter(torch.ones(numel)) for numel in numels]
    optimizer = swap_optimizer(
        torch.optim.AdamW(params),
        SwapOptimizerConfig(swap_times=4, min_numel=1, packed_swap=packed),
        device=device,
    )
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()

    spans = [2 * align(4 * numel) for numel in numels]  # both moments
    values = [2 * 4 * numel for numel in numels]
    arenas = max(spans[0::2]) + max(spans[1::2])
    adjacent = max(values[i] + values[i + 1] for i in range(3))
    assert device.peak_bytes == (arenas if packed else adjacent)
    assert device.held_bytes == 0
    assert device.host_bytes == sum(spans)
    assert (device.copies_in, device.copies_out) == ((4, 4) if packed else (8, 8))

    kept = optimizer.state[params[0]]["exp_avg"]
    del optimizer
    gc.collect()
    assert device.host_bytes == sum(spans), "one state keeps the segment"
    del kept
    assert device.host_bytes == 0


# Copies.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_copies_move_every_bit(dtype: torch.dtype) -> None:
    device, memory = CpuAsDevice(), new_memory(64)
    device.restore(memory)
    source, target = device.allocate_host(64), device.allocate_host(64)
    source[:32].fill_(0xFF)  # NaNs ...
    source[:32:8].copy_(torch.arange(1, 5))  # ... and some with a payload
    source[32:].copy_(torch.arange(32) * 8)
    on_device = view(memory, dtype)
    device.copy_in(device.load_stream, [Transfer(on_device, source.view(dtype))])
    device.copy_out(device.store_stream, [Transfer(on_device, target.view(dtype))])
    assert target.tolist() == source.tolist()
    assert (device.copies_in, device.copies_out, device.restores) == (1, 1, 1)


@pytest.mark.parametrize("verb", ["copy_in", "copy_out"])
@pytest.mark.parametrize("poison", [False, True])
def test_a_copy_that_touches_freed_memory_raises(poison: bool, verb: str) -> None:
    device, memory = CpuAsDevice(poison=poison), new_memory(64)
    device.restore(memory)
    transfer = Transfer(view(memory), device.allocate_host(64))
    device.release(memory)
    with pytest.raises(RuntimeError, match="copy of 64 bytes touches device memory that is freed"):
        getattr(device, verb)(device.load_stream, [transfer])


def test_a_late_copy_that_touches_freed_memory_raises_when_it_runs() -> None:
    device, memory = CpuAsDevice(schedule=CopySchedule.LATEST), new_memory(64)
    event = device.create_event()
    device.restore(memory)
    device.copy_out(device.store_stream, [Transfer(view(memory), device.allocate_host(64))])
    device.record(event, device.store_stream)
    device.release(memory)
    with pytest.raises(RuntimeError, match="released too early"):
        device.synchronize(event)


# Events and identity.


@pytest.mark.parametrize("schedule", CopySchedule)
def test_time_passes_between_events_that_were_synchronized(schedule: CopySchedule) -> None:
    device = CpuAsDevice(schedule=schedule)
    start, end = device.create_event(), device.create_event()
    device.record(start, device.compute_stream())
    device.record(end, device.store_stream)
    device.synchronize(end)
    first = device.elapsed(start, end)
    assert 0 < first < 60
    assert device.elapsed(end, start) == -first

    device.record(end, device.store_stream)
    device.synchronize(end)
    assert device.elapsed(start, end) > first, "recorded again: the later time counts"


@pytest.mark.parametrize("schedule", CopySchedule)
def test_an_event_that_was_never_recorded_holds_nothing_up(schedule: CopySchedule) -> None:
    device = CpuAsDevice(schedule=schedule)
    event = device.create_event()
    for stream in (device.compute_stream(), device.load_stream, device.store_stream):
        device.wait(stream, event)
    device.synchronize(event)


def test_a_copied_device_is_the_same_place() -> None:
    device = CpuAsDevice()
    assert copy.deepcopy(device) is device
    assert copy.deepcopy({"device": [device]})["device"][0] is device


def test_it_stands_for_the_cpu() -> None:
    device = CpuAsDevice()
    assert device.torch_device == torch.device("cpu")
    assert device.out_of_memory is torch.OutOfMemoryError
    streams = [device.compute_stream(), device.load_stream, device.store_stream]
    assert [stream.name for stream in streams] == ["compute", "load", "store"]
    assert device.compute_stream() is streams[0]
