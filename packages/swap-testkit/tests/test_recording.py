# SPDX-License-Identifier: Apache-2.0
"""The recording device: what it writes down, what it passes on, and planted faults."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from swap_core import SwapOptimizerConfig, VirtualDevice, VirtualMemory
from swap_testkit import Op, RecordingDevice, Region, Tamper
from swap_testkit.torch import (
    CopySchedule,
    CpuAsDevice,
    TorchRecordingDevice,
    assert_same_bits,
    host_region_of,
    record_updates,
    regions_of,
)
from swap_torch import DeviceMemory, Transfer, swap_optimizer


class VirtualRegions:
    """A memory is its own buffer; a transfer of n bytes has its first n bytes on each side."""

    def of_memory(self, memory: VirtualMemory) -> Sequence[Region]:
        return [Region(id(memory), 0, memory.nbytes)]

    def of_transfer(self, transfer: int) -> tuple[Region, Region]:
        return Region("device", 0, transfer), Region("host", 0, transfer)


def make() -> tuple[VirtualDevice, RecordingDevice]:
    inner = VirtualDevice(load_bytes_per_second=100, store_bytes_per_second=50, capacity=1000)
    return inner, RecordingDevice(inner, VirtualRegions())


def test_passes_every_verb_on() -> None:
    inner, device = make()
    memory, start, end = VirtualMemory(400), device.create_event(), device.create_event()
    assert device.load_stream is inner.load_stream
    assert device.store_stream is inner.store_stream
    assert device.compute_stream() is inner.compute_stream()
    assert device.out_of_memory is MemoryError

    device.restore(memory)
    assert inner.held_bytes == 400
    device.record(start, device.load_stream)
    device.copy_in(device.load_stream, [100, 300])
    device.record(end, device.load_stream)
    assert device.elapsed(start, end) == 4.0
    device.wait(device.store_stream, end)
    device.copy_out(device.store_stream, [100])
    assert device.store_stream.free_at == 4.0 + 2.0
    device.synchronize(end)
    device.release(memory)
    assert inner.held_bytes == 0


def test_writes_down_verb_stream_event_and_bytes() -> None:
    _, device = make()
    memory, first, second = VirtualMemory(400), device.create_event(), device.create_event()
    held = (Region(id(memory), 0, 400),)
    device.restore(memory)
    device.record(second, device.compute_stream())
    device.wait(device.load_stream, second)
    device.copy_in(device.load_stream, [100, 300])
    device.record(first, device.load_stream)
    device.copy_out(device.store_stream, [100])
    device.synchronize(first)
    device.note_update(held)
    device.note_host_read([Region("host", 0, 8)])
    device.release(memory)

    on_device, on_host = (
        tuple(Region(side, 0, nbytes) for nbytes in (100, 300)) for side in ("device", "host")
    )
    assert device.log == [
        Op("restore", "compute", writes=held),
        Op("record", "compute", 1),
        Op("wait", "load", 1),
        Op("copy_in", "load", reads=on_host, writes=on_device),
        Op("record", "load", 0),
        Op("copy_out", "store", reads=on_device[:1], writes=on_host[:1]),
        Op("synchronize", "host", 0),
        Op("update", "compute", reads=held, writes=held),
        Op("host_read", "host", reads=(Region("host", 0, 8),)),
        Op("release", "compute", writes=held),
    ]
    assert device.ops("record") == [device.log[1], device.log[4]]
    assert device.ops("nothing") == []
    assert [str(op) for op in device.log[1:4]] == [
        "record event 1 on compute",
        "wait event 1 on load",
        "copy_in on load",
    ]


# Planted faults.


def calls_that_arrive(device: RecordingDevice, inner: VirtualDevice, calls: int) -> list[int]:
    """Which of this many copies reach the inner device."""
    arrived = []
    for call in range(calls):
        before = inner.load_stream.free_at
        device.copy_in(device.load_stream, [100])
        if inner.load_stream.free_at > before:
            arrived.append(call)
    return arrived


@pytest.mark.parametrize(
    ("nth", "times", "arrived", "fired"),
    [
        (0, 1, [1, 2, 3, 4], 1),
        (2, 1, [0, 1, 3, 4], 1),
        (1, 3, [0, 4], 3),
        (4, 9, [0, 1, 2, 3], 1),
        (5, 1, [0, 1, 2, 3, 4], 0),
    ],
)
def test_leaves_out_the_calls_that_it_is_told_to(
    nth: int, times: int, arrived: list[int], fired: int
) -> None:
    inner, device = make()
    device.tamper = Tamper("copy_in", nth, times=times)
    device.restore(VirtualMemory(1))  # another verb: not counted
    assert calls_that_arrive(device, inner, 5) == arrived
    assert (device.tamper.seen, device.tamper.fired) == (5, fired)
    assert len(device.ops("copy_in")) == len(arrived), "what was left out is not in the log"


def test_raises_what_it_is_told_to_and_goes_on() -> None:
    inner, device = make()
    error = OSError("the bus is down")
    device.tamper = Tamper("copy_in", 1, error=error)
    device.copy_in(device.load_stream, [100])
    with pytest.raises(OSError, match="the bus is down") as caught:
        device.copy_in(device.load_stream, [100])
    assert caught.value is error
    assert inner.load_stream.free_at == 1.0
    assert calls_that_arrive(device, inner, 1) == [0]
    assert device.tamper.fired == 1


@pytest.mark.parametrize(
    "verb", ["restore", "release", "copy_in", "copy_out", "record", "wait", "synchronize"]
)
def test_every_verb_can_fail(verb: str) -> None:
    _, device = make()
    event, memory = device.create_event(), VirtualMemory(4)
    arguments = {
        "restore": (memory,),
        "release": (memory,),
        "copy_in": (device.load_stream, [4]),
        "copy_out": (device.store_stream, [4]),
        "record": (event, device.load_stream),
        "wait": (device.load_stream, event),
        "synchronize": (event,),
    }
    device.tamper = Tamper(verb, 0, error=RuntimeError("planted"))
    for name, given in arguments.items():
        if name == verb:
            with pytest.raises(RuntimeError, match="planted"):
                getattr(device, name)(*given)
        else:
            getattr(device, name)(*given)
    assert [op.verb for op in device.log] == [name for name in arguments if name != verb]


# torch.


def test_bytes_of_a_tensor_are_counted_from_the_start_of_its_storage() -> None:
    whole = torch.zeros(16, dtype=torch.float32)
    part = whole[4:10].view(2, 3)
    assert (regions_of(whole).start, regions_of(whole).end) == (0, 64)
    assert (regions_of(part).start, regions_of(part).end) == (16, 40)
    assert regions_of(part).overlaps(regions_of(whole[9:10]))
    assert not regions_of(part).overlaps(regions_of(whole[10:]))
    assert not regions_of(whole).overlaps(regions_of(whole.clone()))
    assert regions_of(whole.view(torch.bfloat16)[8:20]) == regions_of(part)


def test_the_torch_device_passes_on_what_torch_asks_for() -> None:
    inner = CpuAsDevice()
    device = TorchRecordingDevice(inner)
    assert device.torch_device == inner.torch_device
    assert device.host_rounding is inner.host_rounding
    assert device.pinned is inner.pinned
    block = device.allocate_host(64)
    assert inner.host_bytes == block.nbytes == 64
    assert device.log == []
    device.tamper = Tamper("allocate_host", 1, error=MemoryError("no host memory"))
    device.allocate_host(1)
    with pytest.raises(MemoryError, match="no host memory"):
        device.allocate_host(1)
    assert inner.host_allocations == 2


def test_the_torch_device_knows_the_bytes_of_memory_and_transfers() -> None:
    device = TorchRecordingDevice(CpuAsDevice())
    storages = tuple(torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in range(2))
    memory = DeviceMemory(storages, (32, 16))
    device.restore(memory)
    on_device = torch.empty(0, dtype=torch.uint8).set_(storages[1], 4, (8,), (1,))
    host = device.allocate_host(64)[8:16]
    device.copy_out(device.store_stream, [Transfer(on_device, host)])

    restore, copy_out = device.log
    assert [(region.start, region.end) for region in restore.writes] == [(0, 32), (0, 16)]
    assert restore.writes[0].buffer != restore.writes[1].buffer
    assert copy_out.reads == (Region(restore.writes[1].buffer, 4, 12),)
    assert copy_out.writes == (host_region_of(host),)
    assert (copy_out.writes[0].start, copy_out.writes[0].end) == (
        host.data_ptr(),
        host.data_ptr() + 8,
    )


@pytest.mark.parametrize("packed", [True, False])
def test_logs_each_update_between_its_load_and_its_store(packed: bool) -> None:
    def make_optimizer() -> torch.optim.AdamW:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(8)) for _ in range(3)])

    native, swapped = make_optimizer(), make_optimizer()
    device = TorchRecordingDevice(CpuAsDevice(schedule=CopySchedule.LATEST))
    config = SwapOptimizerConfig(swap_times=3, min_numel=1, packed_swap=packed)
    swap_optimizer(swapped, config, device=device)
    record_updates(swapped, device)
    for optimizer in (native, swapped):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones(8)
        optimizer.step()
    assert_same_bits(native, swapped)

    updates, stores = device.ops("update"), device.ops("copy_out")
    assert len(updates) == len(stores) == len(device.ops("copy_in")) == 3
    for update, store in zip(updates, stores, strict=True):
        assert update.reads == update.writes
        assert device.log.index(update) < device.log.index(store)
        for region in store.reads:
            assert any(region.overlaps(touched) for touched in update.writes)


def test_only_a_swapped_optimizer_can_be_recorded() -> None:
    native = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match=r"AdamW(.|\n)* is no swapped optimizer; wrap it first"):
        record_updates(native, TorchRecordingDevice(CpuAsDevice()))
