# SPDX-License-Identifier: Apache-2.0
"""Memory to the byte: device, pinned, limits, poison, use of what is freed."""

from __future__ import annotations

import gc

import pytest
import torch

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import NPU_QUIRKS, Quirks, Schedule

DEVICE = "simnpu"
MEMORY = torch.accelerator


@pytest.mark.parametrize(
    ("quirks", "requests"),
    [
        (Quirks(), {1: 512, 512: 512, 513: 1024, 4096: 4096}),
        # (size + 32) up to 512: a power of two takes 512 more.
        (NPU_QUIRKS, {1: 512, 480: 512, 481: 1024, 512: 1024, 4096: 4608}),
    ],
    ids=["plain", "npu"],
)
def test_allocations_are_counted_with_rounding(quirks: Quirks, requests: dict[int, int]) -> None:
    simulator.set_quirks(quirks)
    for nbytes, taken in requests.items():
        before = MEMORY.memory_allocated()
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        assert MEMORY.memory_allocated() - before == taken
        stats = MEMORY.memory_stats()
        assert stats["requested_bytes.all.current"] == nbytes
        assert stats["allocated_bytes.all.current"] == taken
        assert stats["allocation.all.current"] == 1
        del tensor
        assert MEMORY.memory_allocated() == before


def test_peaks_and_reserved_memory() -> None:
    first, second = (torch.empty(1024, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    del first
    assert MEMORY.max_memory_allocated() == 2048
    assert MEMORY.memory_reserved() == 2048
    MEMORY.reset_peak_memory_stats()
    assert MEMORY.max_memory_allocated() == 1024
    MEMORY.empty_cache()
    assert MEMORY.memory_reserved() == 1024
    del second


def test_each_device_counts_its_own() -> None:
    tensor = torch.empty(512, dtype=torch.uint8, device=f"{DEVICE}:1")
    assert (MEMORY.memory_allocated(0), MEMORY.memory_allocated(1)) == (0, 512)
    assert tensor.to(f"{DEVICE}:0").device.index == 0


def test_a_limit_is_an_out_of_memory_error_and_nothing_else_changes() -> None:
    simulator.set_memory_limit(4096)
    before = MEMORY.memory_stats()["num_ooms"]
    kept = torch.ones(512, device=DEVICE)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"asked for, 2048 are in use, the limit is 4096"
    ):
        torch.empty(513, device=DEVICE)
    assert MEMORY.memory_stats()["num_ooms"] == before + 1
    assert torch.accelerator.get_memory_info() == (2048, 4096)
    assert torch.empty(512, device=DEVICE).numel() == 512
    storage = kept.untyped_storage()
    with pytest.raises(torch.OutOfMemoryError):
        storage.resize_(8192)
    assert storage.nbytes() == 2048
    assert kept.sum().item() == 512


def test_memory_is_poisoned_at_first_use_and_when_it_is_used_again(schedule: Schedule) -> None:
    for _ in range(2):
        tensor = torch.empty(100, device=DEVICE)
        assert tensor.isnan().all().item()
        tensor.zero_()
        del tensor
    assert torch.empty(100).pin_memory().is_pinned()
    assert torch.empty(100, pin_memory=True).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_poison_is_nan_in_every_type(dtype: torch.dtype) -> None:
    assert torch.empty(8, dtype=dtype, device=DEVICE).isnan().all().item()


def test_use_of_freed_memory_raises(schedule: Schedule) -> None:
    tensor = torch.ones(64, device=DEVICE)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert MEMORY.memory_allocated() == 0
    for use in (lambda: tensor + 1, lambda: tensor.cpu(), lambda: tensor.zero_()):
        with pytest.raises(RuntimeError, match="used while its storage is freed"):
            use()
    storage.resize_(128)
    with pytest.raises(RuntimeError, match="needs 256 bytes of a storage that has 128"):
        tensor.add_(1)
    storage.resize_(256)
    assert tensor.fill_(2).sum().item() == 128


def test_resizing_keeps_what_fits(schedule: Schedule) -> None:
    tensor = torch.arange(8.0, device=DEVICE)
    storage = tensor.untyped_storage()
    storage.resize_(16)
    storage.resize_(32)
    host = tensor.cpu()
    assert host[:4].tolist() == [0, 1, 2, 3]
    assert host[4:].isnan().all()


def test_record_stream_keeps_memory_until_the_host_knows(schedule: Schedule) -> None:
    side = torch.Stream(device=DEVICE)
    tensor = torch.ones(128, device=DEVICE)
    event = torch.Event(device=DEVICE)
    event.record()
    side.wait_event(event)
    with side:
        copy = tensor + 1
    tensor.record_stream(side)
    where = tensor.data_ptr()
    del tensor
    assert MEMORY.memory_stats()["active_bytes.all.current"] == 1024
    others = [torch.empty(128, device=DEVICE) for _ in range(3)]
    assert where not in {other.data_ptr() for other in others}
    side.synchronize()
    again = torch.empty(128, device=DEVICE)
    assert again.data_ptr() == where
    assert copy.sum().item() == 256


def test_without_record_stream_the_use_is_a_race(schedule: Schedule) -> None:
    side = torch.Stream(device=DEVICE)
    tensor = torch.ones(128, device=DEVICE)
    torch.accelerator.synchronize()
    with side:
        copy = tensor + 1
    del tensor
    again = torch.empty(128, device=DEVICE)
    (race,) = simulator.races()
    assert race.operation == "memory is used again"
    assert race.earlier == "add"
    assert again.numel() == copy.numel()


@pytest.mark.parametrize("power", [False, True])
def test_pinned_memory_is_counted_as_it_is_taken(power: bool) -> None:
    simulator.set_quirks(Quirks(pinned_power_of_two=power))
    gc.collect()
    before = simulator.pinned_bytes()
    simulator.reset()
    block = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    taken = 8192 if power else 5000
    assert simulator.pinned_bytes() - before == taken
    assert torch.get_device_module(DEVICE).host_memory_stats()["allocated_bytes.current"] == (
        before + taken
    )
    view = block[100:200]
    assert view.is_pinned()
    assert not torch.empty(10).is_pinned()
    del block
    assert simulator.pinned_bytes() - before == taken
    del view
    assert simulator.pinned_bytes() == before
    assert simulator.pinned_peak_bytes() == before + taken


def test_pinning_more_than_the_limit_is_a_runtime_error() -> None:
    simulator.set_pinned_limit(simulator.pinned_bytes() + 1000)
    assert torch.empty(1000, dtype=torch.uint8, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match="pinning 1001 bytes of host memory failed") as caught:
        torch.empty(1001, dtype=torch.uint8, pin_memory=True)
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_a_copy_keeps_its_host_memory() -> None:
    simulator.set_schedule(Schedule.LATEST)
    before = simulator.pinned_bytes()
    target = torch.empty(4, device=DEVICE)
    target.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).pin_memory(), non_blocking=True)
    assert simulator.pinned_bytes() > before
    assert target.cpu().tolist() == [1, 2, 3, 4]
    assert simulator.pinned_bytes() == before


# torch_npu's rules for resizing.


def test_a_size_that_is_no_multiple_of_the_items_loses_the_contents() -> None:
    simulator.set_quirks(NPU_QUIRKS)
    tensor = torch.ones(8, device=DEVICE)
    with pytest.raises(RuntimeError, match="items of 4 bytes was resized to 30 bytes"):
        tensor.untyped_storage().resize_(30)
    assert tensor.untyped_storage().nbytes() == 30
    arena = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    arena.untyped_storage().resize_(30)
    arena.untyped_storage().resize_(0)
    simulator.set_quirks(Quirks())
    torch.ones(8, device=DEVICE).untyped_storage().resize_(30)


def test_a_private_format_cannot_be_resized() -> None:
    simulator.set_quirks(NPU_QUIRKS)
    tensor = torch.ones(8, device=DEVICE)
    simulator.mark_private_format(tensor)
    with pytest.raises(RuntimeError, match="without base format"):
        tensor.untyped_storage().resize_(0)
    assert tensor.sum().item() == 8
    simulator.mark_private_format(tensor, on=False)
    tensor.untyped_storage().resize_(0)
