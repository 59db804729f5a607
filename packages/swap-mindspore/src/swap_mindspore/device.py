# SPDX-License-Identifier: Apache-2.0
"""What the engine needs of a device: the verbs of :class:`swap_core.SwapDevice`, for Tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from mindspore import Tensor

from swap_core import SwapDevice
from swap_mindspore.arena import Arena, Piece, Segment

__all__ = [
    "AnyMindSporeDevice",
    "DeviceMemory",
    "Memory",
    "MindSporeSwapDevice",
    "Transfer",
    "empty_storages",
    "fill_storages",
]


class DeviceMemory(NamedTuple):
    """Device tensors that are held together or not at all.

    ``sizes`` are the bytes of each storage while it is held; while it is not, it has 0 bytes, and
    nobody but the engine has a reference to the tensor.
    """

    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]


Memory: TypeAlias = DeviceMemory | Arena
"""Of a batch: storages of its own, or an arena that it shares."""


class Transfer(NamedTuple):
    """Device tensor and host tensor of one copy: contiguous, of one dtype and one shape."""

    device: Tensor
    host: Tensor


StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class MindSporeSwapDevice(SwapDevice[StreamT, EventT, Memory, Transfer], Protocol):
    """A :class:`swap_core.SwapDevice` for the Tensors of one process's device."""

    @property
    def target(self) -> str:
        """The ``device_target`` whose states swap, such as ``Ascend``."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether all host memory allocated so far is pinned."""
        ...

    def allocate_host(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Allocate host memory for one state; its contents are undefined."""
        ...

    def allocate_device(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Make a device tensor with a storage of its own, which is held."""
        ...

    def allocate_segment(self, dtype: object, nbytes: int, pieces: Sequence[Piece]) -> Segment:
        """Allocate contiguous host memory of one dtype, and make a tensor over each piece."""
        ...

    def allocate_arena(self, nbytes: int, pieces: Sequence[Piece]) -> Arena:
        """Make an arena with a Parameter for each piece; it holds no memory yet."""
        ...


# A device's streams and events are its own kinds of object, of no concern to those who hold one.
AnyMindSporeDevice: TypeAlias = MindSporeSwapDevice[Any, Any]


def fill_storages(memory: Memory) -> None:
    """Resize the storages from 0, all of them; let an arena take its memory.

    MindSpore's ``resize_`` returns silently when the device is full, so the size is checked.

    Raises:
        MemoryError: one of them got no memory; those before it have theirs.
    """
    if isinstance(memory, Arena):
        memory.fill()
        return
    for tensor, nbytes in zip(memory.tensors, memory.sizes, strict=True):
        storage = tensor.untyped_storage()
        _resize(storage, nbytes)
        if storage.nbytes() != nbytes:
            raise MemoryError(f"no {nbytes:,} bytes for a tensor of shape {tuple(tensor.shape)}")


def empty_storages(memory: Memory) -> None:
    """Resize the storages to 0 that have a size; the memory goes back to MindSpore's pool."""
    if isinstance(memory, Arena):
        memory.empty()
        return
    for tensor in memory.tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0:
            _resize(storage, 0)


def _resize(storage: Any, nbytes: int) -> None:  # noqa: ANN401  # MindSpore's, untyped
    storage.resize_(nbytes)
