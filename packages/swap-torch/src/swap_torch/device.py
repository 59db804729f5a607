# SPDX-License-Identifier: Apache-2.0
"""The verbs of :class:`swap_core.SwapDevice` for torch, on any accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, final

import torch

from swap_core import HostRounding, SwapDevice

__all__ = [
    "AcceleratorDevice",
    "AnyTorchDevice",
    "DeviceMemory",
    "TorchSwapDevice",
    "Transfer",
    "accelerator_device",
]


class DeviceMemory(NamedTuple):
    """Device storages that are held together or not at all.

    ``sizes`` are the bytes of each while it is held; while it is not, a storage has 0 bytes.
    Views of the storages stay valid across both, and may be read and written only while held.
    """

    storages: tuple[torch.UntypedStorage, ...]
    sizes: tuple[int, ...]


class Transfer(NamedTuple):
    """Device bytes and host bytes of one copy: contiguous, of one dtype and one size."""

    device: torch.Tensor
    host: torch.Tensor


StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class TorchSwapDevice(SwapDevice[StreamT, EventT, DeviceMemory, Transfer], Protocol):
    """A :class:`swap_core.SwapDevice` for the tensors of one ``torch.device``."""

    @property
    def torch_device(self) -> torch.device:
        """Tensors on this device have states that swap."""
        ...

    @property
    def update_stream(self) -> StreamT:
        """The stream of updates in the backward pass; one per device, made once."""
        ...

    def as_current(self, stream: StreamT) -> AbstractContextManager[object]:
        """Make ``stream`` the compute stream inside ``with``."""
        ...

    @property
    def host_rounding(self) -> HostRounding:
        """What :meth:`allocate_host` really takes for a request."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether all host memory allocated so far is pinned."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Bytes of device memory that no allocator has taken, and of all."""
        ...

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate zeroed host memory: 1-D uint8 on the CPU, freed with its last view."""
        ...


# A device's streams and events are its own kinds of object, of no concern to those who hold one.
AnyTorchDevice: TypeAlias = TorchSwapDevice[Any, Any]


@final
class AcceleratorDevice:
    """Any accelerator that torch reaches through ``torch.accelerator`` (CUDA, NPU, XPU, ...).

    Use :func:`accelerator_device`, which makes one for each ``torch.device``: copy streams are
    few on some devices (torch_npu hands out 32 and then repeats them) and are never closed.

    Args:
        torch_device: The device, with its index.
    """

    host_rounding = HostRounding.POWER_OF_TWO
    out_of_memory = torch.OutOfMemoryError

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.load_stream = torch.Stream(device=torch_device)
        self.store_stream = torch.Stream(device=torch_device)
        self.update_stream = torch.Stream(device=torch_device)
        self.pinned = True

    def __reduce__(self) -> tuple[object, ...]:
        """A copied or unpickled optimizer is on the one device object of its process."""
        return accelerator_device, (self.torch_device,)

    def as_current(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """A stream is a context already."""
        return stream

    def compute_stream(self) -> torch.Stream:
        """The caller's current stream on this device."""
        return torch.accelerator.current_stream(self.torch_device)

    def create_event(self) -> torch.Event:
        """Make an event that also takes the time."""
        return torch.Event(device=self.torch_device, enable_timing=True)

    def record(self, event: torch.Event, stream: torch.Stream) -> None:
        """Record ``event`` on ``stream``."""
        event.record(stream)

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Queue a wait on ``stream``."""
        stream.wait_event(event)

    def synchronize(self, event: torch.Event) -> None:
        """Block the host until ``event`` happened."""
        event.synchronize()

    def elapsed(self, start: torch.Event, end: torch.Event) -> float:
        """Seconds between two events that happened."""
        return start.elapsed_time(end) / 1e3

    def restore(self, memory: DeviceMemory) -> None:
        """Resize the storages from 0, all or none, out of the current stream's pool."""
        try:
            for storage, nbytes in zip(memory.storages, memory.sizes, strict=True):
                storage.resize_(nbytes)
        except BaseException:
            self.release(memory)
            raise

    def release(self, memory: DeviceMemory) -> None:
        """Resize the storages to 0; the blocks go back to the caching allocator."""
        for storage in memory.storages:
            storage.resize_(0)

    def release_behind(self, memory: DeviceMemory, stream: torch.Stream) -> None:
        """Resize the storages to 0; the caching allocator keeps the blocks for ``stream``."""
        # record_stream is a tensor's; of this call alone, since threads share the device.
        probe = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        for storage in memory.storages:
            if storage.nbytes() > 0:
                probe.set_(storage)
                probe.record_stream(stream)
                storage.resize_(0)

    def copy_in(self, stream: torch.Stream, transfers: Sequence[Transfer]) -> None:
        """Queue host-to-device copies."""
        with stream:
            for device, host in transfers:
                device.copy_(host, non_blocking=True)

    def copy_out(self, stream: torch.Stream, transfers: Sequence[Transfer]) -> None:
        """Queue device-to-host copies."""
        with stream:
            for device, host in transfers:
                host.copy_(device, non_blocking=True)

    def memory_info(self) -> tuple[int, int]:
        """As the driver tells: what the caching allocator holds is not free."""
        # torch.cuda, torch.npu and torch.xpu have it; torch.accelerator only since torch 2.9.
        free, total = torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)
        return int(free), int(total)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned memory, or pageable memory and one warning where pinning fails."""
        try:
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if self.pinned:
                warnings.warn(
                    f"Pinning {nbytes:,} bytes of host memory failed ({error}); optimizer states "
                    f"of {self.torch_device} use pageable memory instead. Results are the same, "
                    f"but copies no longer overlap the update, so steps are slower. Raise the "
                    f"limit of locked memory (ulimit -l) or free host memory.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.pinned = False
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return block.zero_()


@cache
def accelerator_device(torch_device: torch.device) -> AcceleratorDevice:
    """Give the one :class:`AcceleratorDevice` of ``torch_device`` in this process."""
    return AcceleratorDevice(torch_device)
