# SPDX-License-Identifier: Apache-2.0
"""Ascend, through the documented interface of ``mindspore.runtime``.

Not yet run on a card: the order of its calls is checked with a stand-in of ``mindspore.runtime``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, final

import mindspore as ms
from mindspore import Parameter, Tensor, mint, runtime

from swap_mindspore.arena import Arena, Piece, Segment, itemsize_of
from swap_mindspore.device import Memory, Transfer, empty_storages, fill_storages

__all__ = ["AscendArena", "AscendDevice", "ascend_device"]


@final
class AscendArena(Arena):
    """A byte tensor on the card, and views of it."""

    def __init__(self, nbytes: int, pieces: Sequence[Piece]) -> None:
        super().__init__(nbytes, pieces)
        self._bytes = mint.empty((nbytes,), dtype=ms.uint8, device="Ascend")
        self.views = tuple(
            Parameter(self._view(piece), name=f"swap_arena.{number}")
            for number, piece in enumerate(self.pieces)
        )
        self._bind()
        self.empty()

    def fill(self) -> None:
        """Resize the storage from 0, and bind the views again if they did not follow it."""
        storage = self._bytes.untyped_storage()
        storage.resize_(self.nbytes)
        if storage.nbytes() != self.nbytes:  # MindSpore says nothing when the card is full
            raise MemoryError(f"no {self.nbytes:,} bytes for a staging arena")
        followed = self._bytes.data_ptr() + self.pieces[0].offset
        if self.views[0].data_ptr() != followed:
            self._bind()

    def empty(self) -> None:
        """Resize the storage, which is also that of the views, to 0."""
        storage = self._bytes.untyped_storage()
        if storage.nbytes() > 0:
            storage.resize_(0)

    def _bind(self) -> None:
        for view, piece in zip(self.views, self.pieces, strict=True):
            view.set_data(self._view(piece))

    def _view(self, piece: Piece) -> Tensor:
        part = self._bytes.narrow(0, piece.offset, piece.nbytes)
        return part.view(piece.dtype).view(piece.shape)


@final
class AscendDevice:
    """The Ascend card of this process (MindSpore drives one card per process).

    Use :func:`ascend_device`, which makes one: copy streams are few and are never closed.
    """

    target = "Ascend"
    out_of_memory = MemoryError

    def __init__(self) -> None:
        self.load_stream = runtime.Stream()
        self.store_stream = runtime.Stream()
        self.pinned = True

    def compute_stream(self) -> Any:  # noqa: ANN401  # a mindspore.runtime.Stream, which is untyped
        """The caller's current stream."""
        return runtime.current_stream()

    def create_event(self) -> Any:  # noqa: ANN401
        """Make an event that also takes the time."""
        return runtime.Event(enable_timing=True)

    def record(self, event: Any, stream: Any) -> None:  # noqa: ANN401
        """Record ``event`` on ``stream``."""
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Queue a wait on ``stream``."""
        event.wait(stream)

    def synchronize(self, event: Any) -> None:  # noqa: ANN401
        """Block the host until ``event`` happened."""
        event.synchronize()

    def elapsed(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """Seconds between two events that happened."""
        return float(start.elapsed_time(end)) / 1e3

    def restore(self, memory: Memory) -> None:
        """Resize the storages from 0, all or none, out of the current stream's pool."""
        try:
            fill_storages(memory)
        except BaseException:
            self.release(memory)
            raise

    def release(self, memory: Memory) -> None:
        """Resize the storages to 0; the blocks go back to MindSpore's pool."""
        empty_storages(memory)

    def release_behind(self, memory: Memory, stream: Any) -> None:  # noqa: ANN401
        """Let the compute stream wait for ``stream``, and release."""
        done = self.create_event()
        done.record(stream)
        done.wait(self.compute_stream())
        self.release(memory)

    def copy_in(self, stream: Any, transfers: Sequence[Transfer]) -> None:  # noqa: ANN401
        """Queue host-to-device copies."""
        with runtime.StreamCtx(stream):
            for device, host in transfers:
                device.copy_(host, non_blocking=True)

    def copy_out(self, stream: Any, transfers: Sequence[Transfer]) -> None:  # noqa: ANN401
        """Queue device-to-host copies."""
        with runtime.StreamCtx(stream):
            for device, host in transfers:
                host.copy_(device, non_blocking=True)

    def allocate_host(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Allocate pinned memory, or pageable memory and one warning where pinning fails."""
        try:
            host = mint.empty(tuple(shape), dtype=dtype, device="CPU", pin_memory=True)
            runtime.synchronize()  # MindSpore reports a failure to pin only here
        except RuntimeError as error:
            if self.pinned:
                warnings.warn(
                    f"Pinning host memory of shape {tuple(shape)} failed ({error}); optimizer "
                    f"states use pageable memory instead. Results are the same, but copies no "
                    f"longer overlap the update, so steps are slower. Raise the limit of locked "
                    f"memory (ulimit -l) or free host memory.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.pinned = False
            host = mint.empty(tuple(shape), dtype=dtype, device="CPU")
        return host

    def allocate_device(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Make a tensor on the card."""
        return mint.empty(tuple(shape), dtype=dtype, device="Ascend")

    def allocate_segment(self, dtype: object, nbytes: int, pieces: Sequence[Piece]) -> Segment:
        """Allocate pinned memory. The parts share its storage, each at its own offset."""
        itemsize = itemsize_of(dtype)
        whole = self.allocate_host((nbytes // itemsize,), dtype)
        storage = whole.untyped_storage()
        parts = []
        for piece in pieces:
            # set_ and not narrow, which is an operator of the card.
            part = mint.empty((0,), dtype=dtype, device="CPU")
            offset = piece.offset // itemsize
            parts.append(part.set_(storage, offset, piece.shape, _strides(piece.shape)))
        return Segment(whole, tuple(parts))

    def allocate_arena(self, nbytes: int, pieces: Sequence[Piece]) -> AscendArena:
        """Make an arena on the card."""
        return AscendArena(nbytes, pieces)


@cache
def ascend_device() -> AscendDevice:
    """Give the one :class:`AscendDevice` of this process."""
    return AscendDevice()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
