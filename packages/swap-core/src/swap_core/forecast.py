# SPDX-License-Identifier: Apache-2.0
"""What swapping would save and cost on hardware that is described, not present.

The real partition and the real packed pipeline run on :class:`swap_core.VirtualDevice`, so a
forecast knows the order of copies and waits exactly; bandwidths and launch costs are what it is
told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swap_core.batch import Batch
from swap_core.layout import align
from swap_core.ledger import Ledger
from swap_core.model import VirtualDevice, VirtualEvent, VirtualMemory
from swap_core.packed import PackedPipeline
from swap_core.partition import partition, update_order

__all__ = ["Forecast", "Hardware", "Workload", "forecast", "recommended"]

_GOOD_ENOUGH = 1.05
"""A forecast this near to the fastest is as good: then less memory decides."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, its memory and its link to the host.

    Attributes:
        load_bytes_per_second: From host to device.
        store_bytes_per_second: From device to host.
        memory_bytes_per_second: Of the device's own memory: updates are bound by it.
        duplex: Whether the link carries both directions at full speed at once.
        copy_seconds: What a copy takes besides its bytes.
        launch_seconds: What the update of a batch takes besides its bytes.
    """

    load_bytes_per_second: float
    store_bytes_per_second: float
    memory_bytes_per_second: float
    duplex: bool = True
    copy_seconds: float = 10e-6
    launch_seconds: float = 50e-6

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a rate that is not above 0, or a time below 0.
        """
        for name in ("load", "store", "memory"):
            field = f"{name}_bytes_per_second"
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"Hardware: {field}={value!r} is not accepted; give a rate > 0.")
        for field in ("copy_seconds", "launch_seconds"):
            value = getattr(self, field)
            if not value >= 0:
                raise ValueError(f"Hardware: {field}={value!r} is not accepted; give a time >= 0.")


@dataclass(frozen=True, slots=True)
class Workload:
    """The states of one device that swap.

    Attributes:
        sizes: Bytes of the states of each parameter, in parameter order; each > 0.
        touched_bytes: Bytes of device memory that an update reads and writes, per byte of state:
            states are read and written, parameters too, gradients read.
    """

    sizes: tuple[int, ...]
    touched_bytes: float

    @property
    def state_bytes(self) -> int:
        """Of all states."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """One way to swap a workload. Times are of one update."""

    swap_times: int
    """As asked for."""
    batches: int
    """As many as there are, since a parameter is not cut."""
    state_bytes: int
    """On the device natively, always; on the host swapped."""
    peak_bytes: int
    """On the device in an update, swapped; between updates 0."""
    native_seconds: float
    """The same update with states on the device."""
    update_seconds: float
    """Swapped, from the first copy to the end of the last."""
    floor_seconds: float
    """No order of copies is faster: the slowest of loading, storing and updating everything."""

    @property
    def saved_bytes(self) -> int:
        """Device bytes free in forward and backward passes, where memory is short."""
        return self.state_bytes

    @property
    def added_seconds(self) -> float:
        """What a training step takes longer, if nothing of the update is hidden."""
        return self.update_seconds - self.native_seconds


def forecast(
    workload: Workload, hardware: Hardware, swap_times: int, *, staging_buffers: int = 2
) -> Forecast:
    """Run one update of ``workload`` on a virtual clock, packed.

    Args:
        workload: What swaps; at least one parameter.
        hardware: Where.
        swap_times: Batches asked for, > 0.
        staging_buffers: Arenas, >= 2.

    Raises:
        ValueError: an empty workload, too few batches or too few arenas.
    """
    _check_least("swap_times", swap_times, 1)
    _check_least("staging_buffers", staging_buffers, 2)
    if not workload.sizes:
        raise ValueError("forecast: the workload has no parameters; give the bytes of at least 1.")
    parts = partition(workload.sizes, swap_times)
    cut_bytes = [sum(align(workload.sizes[i]) for i in part) for part in parts]
    batch_bytes = [cut_bytes[position] for position in update_order(cut_bytes)]
    device = _device(hardware)
    ring = min(staging_buffers, len(batch_bytes))
    arenas = [VirtualMemory(max(batch_bytes[number::ring])) for number in range(ring)]
    updates = [_update_seconds(workload, hardware, nbytes) for nbytes in batch_bytes]
    pipeline: PackedPipeline[object, VirtualEvent, VirtualMemory, int] = PackedPipeline(
        device,  # type: ignore[arg-type]  # its streams are known to it alone
        Ledger(),
        [(arena, arena.nbytes) for arena in arenas],
    )
    pipeline.run(
        [_batch(index, nbytes, arenas[index % ring]) for index, nbytes in enumerate(batch_bytes)],
        lambda index: device.compute(updates[index]),
        lambda: None,
    )
    return Forecast(
        swap_times=swap_times,
        batches=len(parts),
        state_bytes=workload.state_bytes,
        peak_bytes=device.peak_bytes,
        native_seconds=_update_seconds(workload, hardware, sum(batch_bytes)),
        update_seconds=device.now,
        floor_seconds=_floor(hardware, batch_bytes, updates),
    )


def recommended(forecasts: Sequence[Forecast]) -> Forecast:
    """Of those that are nearly as fast as the fastest, the one that needs least device memory."""
    fastest = min(each.update_seconds for each in forecasts)
    near = [each for each in forecasts if each.update_seconds <= _GOOD_ENOUGH * fastest]
    return min(near, key=lambda each: (each.peak_bytes, each.swap_times))


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"forecast: {name}={value!r} is not accepted; give an integer >= {least}.")


def _device(hardware: Hardware) -> VirtualDevice:
    return VirtualDevice(
        load_bytes_per_second=hardware.load_bytes_per_second,
        store_bytes_per_second=hardware.store_bytes_per_second,
        latency=hardware.copy_seconds,
        duplex=hardware.duplex,
    )


def _update_seconds(workload: Workload, hardware: Hardware, nbytes: int) -> float:
    touched = nbytes * workload.touched_bytes
    return hardware.launch_seconds + touched / hardware.memory_bytes_per_second


def _batch(
    index: int, nbytes: int, arena: VirtualMemory
) -> Batch[VirtualEvent, VirtualMemory, int]:
    return Batch(
        index=index,
        nbytes=nbytes,
        memory=arena,
        transfers=(nbytes,),
        restored=VirtualEvent(),
        loaded=VirtualEvent(),
        updated=VirtualEvent(),
        stored=VirtualEvent(),
    )


def _floor(hardware: Hardware, batch_bytes: Sequence[int], updates: Sequence[float]) -> float:
    loads = [hardware.copy_seconds + n / hardware.load_bytes_per_second for n in batch_bytes]
    stores = [hardware.copy_seconds + n / hardware.store_bytes_per_second for n in batch_bytes]
    link = max(sum(loads), sum(stores)) if hardware.duplex else sum(loads) + sum(stores)
    return max(link, sum(updates))
