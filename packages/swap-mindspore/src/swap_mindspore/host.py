# SPDX-License-Identifier: Apache-2.0
"""CPU tensors in the role of device memory: for tests, and for machines without an accelerator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from time import perf_counter
from typing import final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint
from numpy.typing import NDArray

from swap_mindspore.arena import Arena, Piece, Segment, itemsize_of
from swap_mindspore.device import Memory, Transfer, empty_storages, fill_storages
from swap_mindspore.versions import executor

__all__ = ["HostArena", "HostDevice", "HostEvent", "HostStream"]

_NUMPY = {
    ms.bfloat16: np.uint16,  # numpy has no such type
    ms.float16: np.float16,
    ms.float32: np.float32,
    ms.float64: np.float64,
}
_POISON = 0xFF  # NaN in every floating point type


@final
class HostStream:
    """A name: on the CPU everything happens in the order in which it is asked for."""


@final
class HostEvent:
    """A moment."""

    seconds = 0.0


@final
class HostArena(Arena):
    """A numpy array, and tensors over it that are made anew each time it takes memory."""

    def __init__(self, nbytes: int, pieces: Sequence[Piece]) -> None:
        super().__init__(nbytes, pieces)
        self._bytes = np.empty(0, np.uint8)
        self._nothing = tuple(mint.empty(piece.shape, dtype=piece.dtype) for piece in self.pieces)
        """For each view what it is bound to without memory: it has a shape, and 0 bytes."""
        self.views = tuple(
            Parameter(tensor, name=f"swap_arena.{number}")
            for number, tensor in enumerate(self._nothing)
        )
        self.empty()

    def fill(self) -> None:
        """Make an array and bind every view to it."""
        self._bytes = np.empty(self.nbytes, np.uint8)
        for view, piece in zip(self.views, self.pieces, strict=True):
            view.set_data(_tensor_over(self._bytes, piece))

    def empty(self) -> None:
        """Let go of the array. Only ``set_data`` makes a Parameter let go, ``resize_`` does not."""
        for view, nothing in zip(self.views, self._nothing, strict=True):
            nothing.untyped_storage().resize_(0)
            view.set_data(nothing)
        self._bytes = np.empty(0, np.uint8)

    def overwrite(self, byte: int) -> None:
        """Set every byte that is held."""
        self._bytes[:] = byte


@final
class HostDevice:
    """The CPU. Copies are real, and released storages have 0 bytes, but nothing overlaps.

    Args:
        poison: Overwrite device memory before it is released and after it is restored. A freed
            tensor of MindSpore raises nothing, and memory that is freed and taken again mostly
            still holds what it held: without this, an update that forgot to load would go unseen.
    """

    target = "CPU"
    out_of_memory = MemoryError
    pinned = False

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison
        self.load_stream = HostStream()
        self.store_stream = HostStream()
        self._compute_stream = HostStream()

    def compute_stream(self) -> HostStream:
        """The only place where computation runs."""
        return self._compute_stream

    def create_event(self) -> HostEvent:
        """Make an event."""
        return HostEvent()

    def record(self, event: HostEvent, stream: HostStream) -> None:
        """Finish everything asked for so far, and take the time."""
        _finish_pending_work()
        event.seconds = perf_counter()

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        """Nothing to wait for: ``event`` happened when it was recorded."""

    def synchronize(self, event: HostEvent) -> None:
        """Nothing to wait for: ``event`` happened when it was recorded."""

    def elapsed(self, start: HostEvent, end: HostEvent) -> float:
        """Seconds between two events."""
        return end.seconds - start.seconds

    def restore(self, memory: Memory) -> None:
        """Resize the storages from 0, all or none."""
        try:
            fill_storages(memory)
        except BaseException:
            self.release(memory)
            raise
        if self.poison:
            _overwrite(memory)

    def release(self, memory: Memory) -> None:
        """Resize the storages to 0."""
        _finish_pending_work()
        if self.poison:
            _overwrite(memory)
        empty_storages(memory)

    def release_behind(self, memory: Memory, stream: HostStream) -> None:
        """Release: the host has no streams, so all work is done."""
        self.release(memory)

    def copy_in(self, stream: HostStream, transfers: Sequence[Transfer]) -> None:
        """Copy from host tensors to device tensors."""
        for device, host in transfers:
            device.copy_(host)

    def copy_out(self, stream: HostStream, transfers: Sequence[Transfer]) -> None:
        """Copy from device tensors to host tensors."""
        for device, host in transfers:
            host.copy_(device)

    def allocate_host(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Allocate pageable memory.

        By numpy, whose memory no allocator of MindSpore ever moves or pools; the tensor keeps the
        array alive.
        """
        array = np.zeros(tuple(shape), dtype=_NUMPY[dtype]).reshape(-1).view(np.uint8)
        return _tensor_over(array, Piece(0, tuple(shape), dtype))

    def allocate_device(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Make a tensor as operators do."""
        return mint.empty(tuple(shape), dtype=dtype)

    def allocate_segment(self, dtype: object, nbytes: int, pieces: Sequence[Piece]) -> Segment:
        """Allocate pageable memory, by numpy as well."""
        array = np.zeros(nbytes, np.uint8)
        whole = Piece(0, (nbytes // itemsize_of(dtype),), dtype)
        parts = tuple(_tensor_over(array, piece) for piece in pieces)
        return Segment(_tensor_over(array, whole), parts)

    def allocate_arena(self, nbytes: int, pieces: Sequence[Piece]) -> HostArena:
        """Make an arena of numpy memory."""
        return HostArena(nbytes, pieces)


def _tensor_over(array: NDArray[np.uint8], piece: Piece) -> Tensor:
    """A tensor whose storage is a part of ``array``, which it keeps alive."""
    part = array[piece.offset : piece.offset + piece.nbytes].view(_NUMPY[piece.dtype])
    tensor = Tensor.from_numpy(part.reshape(piece.shape))
    return tensor.view(ms.bfloat16) if piece.dtype == ms.bfloat16 else tensor


def _overwrite(memory: Memory) -> None:
    _finish_pending_work()
    if isinstance(memory, HostArena):
        memory.overwrite(_POISON)
        return
    assert not isinstance(memory, Arena)  # this device makes no other
    for tensor in memory.tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0:
            ctypes.memset(storage.data_ptr(), _POISON, storage.nbytes())


def _finish_pending_work() -> None:
    """Wait for MindSpore's dispatch threads; ``runtime.synchronize`` does not on the CPU.

    Raises:
        RuntimeError: an operator that was queued earlier has failed.
    """
    executor.sync()
