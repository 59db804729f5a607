# SPDX-License-Identifier: Apache-2.0
"""Record what a swapped MindSpore optimizer asks of its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from mindspore import Tensor, nn

from swap_mindspore import MindSporeSwapOptimizer, Transfer
from swap_mindspore.adapter import MindSporeStep, UpdateCall
from swap_mindspore.arena import Arena, Piece, Segment
from swap_mindspore.device import AnyMindSporeDevice, Memory
from swap_testkit.recording import RecordingDevice, Region

__all__ = ["MindSporeRecordingDevice", "MindSporeRegions", "record_updates", "region_of"]


def region_of(tensor: Tensor) -> Region:
    """The bytes of a tensor that keeps its identity, wherever its storage is at present."""
    return Region(("tensor", id(tensor)), 0, tensor.nbytes)


@final
class MindSporeRegions:
    """Bytes of MindSpore handles: a buffer is an arena, or a tensor, which is kept for life."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[Tensor, Region]] = {}

    def note(self, arena: Arena) -> None:
        """Learn what the views of an arena are views of."""
        for view, piece in zip(arena.views, arena.pieces, strict=True):
            region = Region(("arena", id(arena)), piece.offset, piece.offset + piece.nbytes)
            self._views[id(view)] = (view, region)  # the view is kept, and with it its identity

    def of_tensor(self, tensor: Tensor) -> Region:
        """The part of an arena, or the tensor as a whole."""
        known = self._views.get(id(tensor))
        return known[1] if known is not None else region_of(tensor)

    def of_memory(self, memory: Memory) -> Sequence[Region]:
        """The arena, or each tensor as a whole."""
        if isinstance(memory, Arena):
            return [Region(("arena", id(memory)), 0, memory.nbytes)]
        return [region_of(tensor) for tensor in memory.tensors]

    def of_transfer(self, transfer: Transfer) -> tuple[Region, Region]:
        """Both sides."""
        return self.of_tensor(transfer.device), self.of_tensor(transfer.host)


@final
class MindSporeRecordingDevice(RecordingDevice[Any, Any, Memory, Transfer]):
    """A :class:`swap_mindspore.MindSporeSwapDevice` that records and can be tampered with.

    Args:
        inner: The device that does the work.
    """

    def __init__(self, inner: AnyMindSporeDevice) -> None:
        self.regions = MindSporeRegions()
        super().__init__(inner, self.regions)
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
        self._fail_if_told()
        return self._mindspore.allocate_host(shape, dtype)

    def allocate_segment(self, dtype: object, nbytes: int, pieces: Sequence[Piece]) -> Segment:
        """As :meth:`allocate_host`, under whose name it can be made to fail."""
        self._fail_if_told()
        return self._mindspore.allocate_segment(dtype, nbytes, pieces)

    def allocate_device(self, shape: Sequence[int], dtype: object) -> Tensor:
        """The inner device's; not recorded."""
        return self._mindspore.allocate_device(shape, dtype)

    def allocate_arena(self, nbytes: int, pieces: Sequence[Piece]) -> Arena:
        """The inner device's; not recorded."""
        arena = self._mindspore.allocate_arena(nbytes, pieces)
        self.regions.note(arena)
        return arena

    def _fail_if_told(self) -> None:
        tamper = self.tamper
        if tamper is not None and tamper.verb == "allocate_host" and tamper.strikes():
            raise tamper.error or MemoryError("allocate_host cannot be left out")


def record_updates(optimizer: nn.Optimizer, device: MindSporeRecordingDevice) -> None:
    """Let ``device`` also log each batch's update, with the device memory that it touches."""
    if not isinstance(optimizer, MindSporeSwapOptimizer):
        raise TypeError(f"record_updates: {optimizer!r} is no swapped optimizer; wrap it first.")
    adapter = optimizer._swap.adapter
    native = adapter.step_batch

    def step_batch(step: MindSporeStep, call: UpdateCall) -> None:
        tensors = [state for member in call.members for state in member.states.values()]
        device.note_update([device.regions.of_tensor(tensor) for tensor in tensors])
        native(step, call)

    adapter.step_batch = step_batch  # type: ignore[method-assign]
