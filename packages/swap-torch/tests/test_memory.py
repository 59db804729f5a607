# SPDX-License-Identifier: Apache-2.0
"""How much device and host memory states take: nothing between updates, and a formula in them.

The formulas are computed here from shapes, the partition and its order, and compared with what the
device counted, which in turn must be what the report says.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch

from swap_core import HostRounding, partition, update_order
from swap_testkit.torch import CopySchedule, CpuAsDevice, TorchRecordingDevice
from swap_torch import AcceleratorDevice, DeviceMemory, swap_optimizer
from swap_torch import SwapOptimizerConfig as Config

SHAPES = [(33, 17), (1024,), (3,), (300, 7), (2049,), (64, 64), (128,), (5, 5, 5), (777,), (40, 50)]
"""Sizes that are no multiples of the alignment, and a first parameter larger than the second."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def make_parameters(shapes: Sequence[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, 0.25)
    return params


def batch_bytes(
    params: Sequence[torch.Tensor], states: int, swap_times: int, *, pad: bool
) -> list[int]:
    """Bytes of each batch, as they are updated; the cut is by padded bytes whatever is counted."""
    exact = [param.numel() * param.element_size() for param in params]
    padded = [states * aligned(nbytes) for nbytes in exact]
    parts = partition(padded, swap_times)
    counted = padded if pad else [states * nbytes for nbytes in exact]
    sizes = [sum(counted[i] for i in part) for part in parts]
    return [sizes[position] for position in update_order(sizes)] if pad else sizes


def peak_packed(batches: Sequence[int], arenas: int) -> int:
    """Each arena is as large as the largest of its batches; all are held at once."""
    ring = min(arenas, len(batches))
    return sum(max(batches[first::ring]) for first in range(ring))


def peak_per_tensor(batches: Sequence[int]) -> int:
    """One batch is updated while the next one is loaded."""
    return max(sum(batches[i : i + 2]) for i in range(len(batches)))


def device_storages(optimizer: Any) -> list[torch.UntypedStorage]:
    """Every device storage that states of the latest update ever live in."""
    batches = [batch for lane in optimizer._swap._runner.latest for batch in lane.batches]
    return [storage for batch in batches for storage in batch.memory.storages]


@pytest.fixture
def frozen() -> Iterator[Callable[[], None]]:
    """Hides what exists when it is called from :func:`live_bytes`, which is also much faster."""
    yield gc.freeze
    gc.unfreeze()


def live_bytes() -> int:
    """Bytes of all tensors alive; memory that several of them share once."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


PACKED_AND_ARENAS = [(True, 2), (True, 3), (True, 5), (False, 2)]


@pytest.mark.parametrize(("packed", "arenas"), PACKED_AND_ARENAS)
@pytest.mark.parametrize("swap_times", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_peak_is_the_formula_from_the_first_step_on(
    packed: bool, arenas: int, swap_times: int, amsgrad: bool
) -> None:
    params = make_parameters(SHAPES)
    device = CpuAsDevice()
    config = Config(swap_times=swap_times, min_numel=0, packed_swap=packed, staging_buffers=arenas)
    optimizer: Any = swap_optimizer(
        torch.optim.AdamW(params, amsgrad=amsgrad), config, device=device
    )
    batches = batch_bytes(params, 3 if amsgrad else 2, swap_times, pad=packed)
    assert len(batches) == min(swap_times, len(params))
    expected = peak_packed(batches, arenas) if packed else peak_per_tensor(batches)
    for _ in range(3):
        optimizer.step()
        assert device.peak_bytes == expected
        assert device.held_bytes == 0
        device.peak_bytes = 0
    report = optimizer.swap_report()
    assert report.peak_device_bytes == expected
    assert report.batch_bytes == tuple(batches)


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"prefetch": "backward"}, torch.optim.AdamW),
        ({"overlap_backward": "trusted"}, torch.optim.AdamW),
        ({}, partial(torch.optim.SGD, momentum=0.9)),
    ],
    ids=["loads follow backward", "updates follow backward", "its own step"],
)
def test_the_order_of_parameters_is_kept_where_something_follows_it(
    options: dict[str, Any], make: Callable[..., torch.optim.Optimizer]
) -> None:
    params = make_parameters([(600,), (6000,), (700,), (7000,), (800,)])
    config = Config(swap_times=5, min_numel=0, **options)
    optimizer: Any = swap_optimizer(make(params, lr=0.1), config, device=CpuAsDevice())
    optimizer.step()
    found = optimizer.swap_report().batch_bytes
    assert found == tuple(found[0] // 2560 * aligned(4 * p.numel()) for p in params)
    assert found[0] < found[1] > found[2] < found[3] > found[4]


@pytest.mark.parametrize("packed", [True, False])
def test_states_that_stay_do_not_count(packed: bool) -> None:
    params = make_parameters(SHAPES)
    device = CpuAsDevice()
    config = Config(swap_times=3, min_numel=700, packed_swap=packed, state_keys=("exp_avg_sq",))
    optimizer: Any = swap_optimizer(torch.optim.AdamW(params), config, device=device)
    optimizer.step()
    swapped = [param for param in params if param.numel() >= 700]
    batches = batch_bytes(swapped, 1, 3, pad=packed)
    assert device.peak_bytes == (peak_packed(batches, 2) if packed else peak_per_tensor(batches))
    report = optimizer.swap_report()
    assert report.swapped_bytes == sum(4 * param.numel() for param in swapped)
    everything = sum(2 * 4 * param.numel() for param in params)
    assert report.resident_bytes == everything - report.swapped_bytes


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_idle_is_zero_from_wrapping_on(
    packed: bool, steps_before: int, frozen: Callable[[], None]
) -> None:
    params = make_parameters(SHAPES)
    frozen()
    native = torch.optim.AdamW(params)
    for _ in range(steps_before):
        native.step()
    old = [
        ref(entry[key].untyped_storage())
        for entry in native.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    assert len(old) == (2 * len(params) if steps_before else 0)
    device = CpuAsDevice()
    config = Config(swap_times=4, min_numel=0, packed_swap=packed)
    optimizer: Any = swap_optimizer(native, config, device=device)
    counters = 4 * len(params)
    values = sum(2 * 4 * param.numel() for param in params)
    for step in range(4):
        born = step > 0 or steps_before > 0
        assert device.held_bytes == 0
        assert all(storage.nbytes() == 0 for storage in device_storages(optimizer))
        report = optimizer.swap_report()
        assert report.idle_device_bytes == 0
        assert report.resident_bytes == 0
        assert report.swapped_bytes == (values if born else 0)
        # Nothing but host memory and counters: neither the old states nor arenas or mirrors.
        assert live_bytes() == device.host_bytes + (counters if born else 0)
        optimizer.step()
    assert not [storage for storage in old if storage() is not None]


@pytest.mark.parametrize("rounding", HostRounding)
def test_the_workload_of_the_rfc(rounding: HostRounding) -> None:
    layer = [(64, 1024)] * 8 + [(128,)] * 6 + [(256,)] * 3
    params = make_parameters(layer * 48)
    state_bytes = sum(2 * 4 * param.numel() for param in params)
    assert (len(params), state_bytes) == (816, 2 * 4 * 25_239_552)
    device = CpuAsDevice()
    device.host_rounding = rounding
    requests: list[int] = []
    allocate = device.allocate_host
    device.allocate_host = lambda nbytes: (  # type: ignore[method-assign]
        requests.append(nbytes) or allocate(nbytes)  # type: ignore[func-returns-value]
    )
    config = Config(swap_times=16, min_numel=0)
    optimizer: Any = swap_optimizer(torch.optim.AdamW(params), config, device=device)
    optimizer.step()
    assert device.held_bytes == 0
    assert device.peak_bytes <= 2 / 16 * state_bytes
    assert device.peak_bytes == 2 * max(batch_bytes(params, 2, 16, pad=True))
    taken = sum(
        nbytes if rounding is HostRounding.EXACT else 1 << (nbytes - 1).bit_length()
        for nbytes in requests
    )
    report = optimizer.swap_report()
    assert report.host_bytes == taken
    assert state_bytes <= report.host_bytes <= 1.02 * state_bytes
    assert report.batches == 16
    assert device.host_bytes == sum(requests)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("schedule", CopySchedule)
def test_the_report_says_what_the_device_counted(packed: bool, schedule: CopySchedule) -> None:
    params = make_parameters(SHAPES)
    inner = CpuAsDevice(schedule=schedule)
    device = TorchRecordingDevice(inner)
    config = Config(swap_times=4, min_numel=0, packed_swap=packed)
    optimizer: Any = swap_optimizer(torch.optim.AdamW(params), config, device=device)
    optimizer.step()
    before, taken = optimizer.swap_report().ledger, inner.restores
    for _ in range(3):
        optimizer.step()
    report = optimizer.swap_report()
    ledger = report.ledger
    assert ledger.updates == 4
    assert (ledger.copies_in, ledger.copies_out) == (inner.copies_in, inner.copies_out)
    assert ledger.restores - before.restores == inner.restores - taken
    assert ledger.peak_device_bytes == inner.peak_bytes
    assert ledger.device_bytes == inner.held_bytes == 0
    assert ledger.host_bytes == inner.host_bytes
    assert ledger.host_allocations == inner.host_allocations == 1
    loaded = [region for op in device.ops("copy_in") for region in op.writes]
    stored = [region for op in device.ops("copy_out") for region in op.writes]
    assert ledger.bytes_loaded == sum(region.end - region.start for region in loaded)
    assert ledger.bytes_stored == sum(region.end - region.start for region in stored)
    assert ledger.bytes_loaded == 4 * sum(report.batch_bytes)


@pytest.mark.parametrize("packed", [True, False])
def test_host_memory_goes_with_the_optimizer_and_its_last_state(
    packed: bool, twins: Callable[..., Any]
) -> None:
    device = CpuAsDevice()
    pair = twins(SHAPES, config=Config(min_numel=0, packed_swap=packed), device=device)
    pair.give_gradients()
    pair.swapped.step()
    held = next(iter(pair.swapped.state.values()))["exp_avg"]
    everything = device.host_bytes
    assert everything > 0
    del pair
    gc.collect()
    assert device.host_bytes == everything
    assert torch.isfinite(held).all()
    del held
    gc.collect()
    assert device.host_bytes == 0


# The accelerator's own verbs, as far as they run on the CPU: streams and real pinning do not.


def cpu_accelerator() -> AcceleratorDevice:
    """Without streams, which need an accelerator."""
    device = object.__new__(AcceleratorDevice)
    device.torch_device, device.pinned = torch.device("cpu"), True
    return device


def test_pinning_that_is_refused_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no memory can be locked")
        return empty(*args, **kwargs).fill_(7)

    monkeypatch.setattr(torch, "empty", refuse)
    device = cpu_accelerator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks = [device.allocate_host(123456), device.allocate_host(10)]
    assert [w.category for w in caught] == [RuntimeWarning]
    for words in ("123,456 bytes", "no memory can be locked", "pageable", "slower", "ulimit -l"):
        assert words in str(caught[0].message)
    assert not device.pinned
    assert [(block.dtype, block.numel()) for block in blocks] == [
        (torch.uint8, 123456),
        (torch.uint8, 10),
    ]
    assert not any(block.is_pinned() or block.any() for block in blocks)


def test_a_restore_takes_all_storages_or_none() -> None:
    class Full:
        """A storage of a device that is full."""

        def resize_(self, nbytes: int) -> None:
            if nbytes:
                raise torch.OutOfMemoryError("full")

    storages = [torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in range(2)]
    memory = DeviceMemory((*storages, Full()), (8, 16, 4))  # type: ignore[arg-type]
    device = cpu_accelerator()
    with pytest.raises(torch.OutOfMemoryError):
        device.restore(memory)
    assert [storage.nbytes() for storage in storages] == [0, 0]
    memory = DeviceMemory(tuple(storages), (8, 16))
    device.restore(memory)
    assert [storage.nbytes() for storage in storages] == [8, 16]
    for _ in range(2):
        device.release(memory)
        assert [storage.nbytes() for storage in storages] == [0, 0]
