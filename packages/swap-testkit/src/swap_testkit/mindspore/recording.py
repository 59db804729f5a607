# SPDX-License-Identifier: Apache-2.0
"""Record what a swapped MindSpore optimizer asks of its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from mindspore import Tensor, nn

from swap_mindspore import DeviceMemory, MindSporeSwapOptimizer, Transfer
from swap_mindspore.adapter import MindSporeStep, UpdateCall
from swap_mindspore.device import AnyMindSporeDevice
from swap_testkit.recording import RecordingDevice, Region

__all__ = ["MindSporeRecordingDevice", "MindSporeRegions", "record_updates", "region_of"]


def region_of(tensor: Tensor) -> Region:
    """The bytes of a tensor that keeps its identity, wherever its storage is at present."""
    return Region(("tensor", id(tensor)), 0, tensor.nbytes)


@final
class MindSporeRegions:
    """Bytes of MindSpore handles: a buffer is a tensor, which the engine keeps for life."""

    def of_memory(self, memory: DeviceMemory) -> Sequence[Region]:
        """Each tensor as a whole."""
        return [region_of(tensor) for tensor in memory.tensors]

    def of_transfer(self, transfer: Transfer) -> tuple[Region, Region]:
        """Both tensors as a whole."""
        return region_of(transfer.device), region_of(transfer.host)


@final
class MindSporeRecordingDevice(RecordingDevice[Any, Any, DeviceMemory, Transfer]):
    """A :class:`swap_mindspore.MindSporeSwapDevice` that records and can be tampered with.

    Args:
        inner: The device that does the work.
    """

    def __init__(self, inner: AnyMindSporeDevice) -> None:
        super().__init__(inner, MindSporeRegions())
        self._mindspore = inner

    @property
    def target(self) -> str:
        """The inner device's."""
        return self._mindspore.target

    @property
    def pinned(self) -> bool:
        """The inner device's."""
        return self._mindspore.pinned

    def allocate_host(self, shape: Sequence[int], dtype: object) -> Tensor:
        """The inner device's; not recorded, but it can be made to fail."""
        tamper = self.tamper
        if tamper is not None and tamper.verb == "allocate_host" and tamper.strikes():
            raise tamper.error or MemoryError("allocate_host cannot be left out")
        return self._mindspore.allocate_host(shape, dtype)

    def allocate_device(self, shape: Sequence[int], dtype: object) -> Tensor:
        """The inner device's; not recorded."""
        return self._mindspore.allocate_device(shape, dtype)


def record_updates(optimizer: nn.Optimizer, device: MindSporeRecordingDevice) -> None:
    """Let ``device`` also log each batch's update, with the device memory that it touches."""
    if not isinstance(optimizer, MindSporeSwapOptimizer):
        raise TypeError(f"record_updates: {optimizer!r} is no swapped optimizer; wrap it first.")
    adapter = optimizer._swap.adapter
    native = adapter.step_batch

    def step_batch(step: MindSporeStep, call: UpdateCall) -> None:
        tensors = [state for member in call.members for state in member.states.values()]
        device.note_update([region_of(tensor) for tensor in tensors])
        native(step, call)

    adapter.step_batch = step_batch  # type: ignore[method-assign]
