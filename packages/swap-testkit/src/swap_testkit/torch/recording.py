# SPDX-License-Identifier: Apache-2.0
"""Record what a swapped torch optimizer asks of its device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, final

import torch

from swap_core import HostRounding
from swap_testkit.recording import RecordingDevice, Region
from swap_torch import DeviceMemory, TorchSwapDevice, TorchSwapOptimizer, Transfer
from swap_torch.adapter import TorchStep, UpdateCall
from swap_torch.forms import memories_of

__all__ = [
    "TorchRecordingDevice",
    "TorchRegions",
    "host_region_of",
    "record_updates",
    "regions_of",
]

_AnyDevice: TypeAlias = TorchSwapDevice[Any, Any]


@final
class TorchRegions:
    """Bytes of torch handles: a buffer is a storage, which has one identity for its whole life."""

    def of_memory(self, memory: DeviceMemory) -> Sequence[Region]:
        """Each storage as a whole."""
        return [
            Region(("storage", storage._cdata), 0, nbytes)
            for storage, nbytes in zip(memory.storages, memory.sizes, strict=True)
        ]

    def of_transfer(self, transfer: Transfer) -> tuple[Region, Region]:
        """Both tensors, which are contiguous."""
        return regions_of(transfer.device), host_region_of(transfer.host)


def regions_of(tensor: torch.Tensor) -> Region:
    """The bytes of a dense tensor within its storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    end = start + tensor.numel() * tensor.element_size()
    return Region(("storage", tensor.untyped_storage()._cdata), start, end)


def host_region_of(tensor: torch.Tensor) -> Region:
    """The bytes of a dense tensor in host memory.

    By address: a state that ``optimizer.state`` shows has a storage of its own over the bytes that
    copies read and write. Host memory is not moved while it is used.
    """
    start = tensor.data_ptr()
    return Region("host memory", start, start + tensor.nbytes)


@final
class TorchRecordingDevice(RecordingDevice[Any, Any, DeviceMemory, Transfer]):
    """A :class:`swap_torch.TorchSwapDevice` that records and can be tampered with.

    Args:
        inner: The device that does the work.
    """

    def __init__(self, inner: _AnyDevice) -> None:
        super().__init__(inner, TorchRegions())
        self._torch = inner

    @property
    def torch_device(self) -> torch.device:
        """The inner device's."""
        return self._torch.torch_device

    @property
    def update_stream(self) -> Any:  # noqa: ANN401  # the inner device's own kind
        """The inner device's."""
        return self._torch.update_stream

    def as_current(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401
        """The inner device's."""
        return self._torch.as_current(stream)

    @property
    def host_rounding(self) -> HostRounding:
        """The inner device's."""
        return self._torch.host_rounding

    @property
    def pinned(self) -> bool:
        """The inner device's."""
        return self._torch.pinned

    def memory_info(self) -> tuple[int, int]:
        """The inner device's."""
        return self._torch.memory_info()

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """The inner device's; not recorded, but it can be made to fail."""
        tamper = self.tamper
        if tamper is not None and tamper.verb == "allocate_host" and tamper.strikes():
            raise tamper.error or MemoryError("allocate_host cannot be left out")
        return self._torch.allocate_host(nbytes)


def record_updates(optimizer: torch.optim.Optimizer, device: TorchRecordingDevice) -> None:
    """Let ``device`` also log each batch's update, with the device memory that it touches."""
    if not isinstance(optimizer, TorchSwapOptimizer):
        raise TypeError(f"record_updates: {optimizer!r} is no swapped optimizer; wrap it first.")
    adapter = optimizer._swap.adapter
    native = adapter.step_batch

    def step_batch(step: TorchStep, call: UpdateCall) -> None:
        swapped = [tensor for tensors in call.states.values() for tensor in tensors]
        memories = [memory for state in swapped for memory in memories_of(state)]
        device.note_update([regions_of(memory) for memory in memories])
        native(step, call)

    adapter.step_batch = step_batch  # type: ignore[method-assign]
