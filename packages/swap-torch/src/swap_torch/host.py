# SPDX-License-Identifier: Apache-2.0
"""Host memory of one optimizer on one device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from swap_core import Ledger, Span, place
from swap_torch.device import AnyTorchDevice

__all__ = ["HostPool", "own_storage_view"]


@final
class HostPool:
    """Segments of pinned memory, in the order in which states were born.

    A segment lives as long as the pool or any view of it does; it is never moved, so addresses
    are constant and a state dict that a user holds stays readable after the optimizer is gone.
    """

    def __init__(self, device: AnyTorchDevice, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._segments: dict[int, torch.Tensor] = {}
        self._next = 0

    @property
    def pinned(self) -> bool:
        """Whether the device could pin all its host memory."""
        return self._device.pinned

    def reserve(self, units: Sequence[Sequence[int]]) -> list[list[Span]]:
        """Allocate zeroed memory for states; all of it, or none when an allocation fails.

        Args:
            units: For each parameter the bytes of its states.
        """
        spans, sizes = place(units, rounding=self._device.host_rounding, first_segment=self._next)
        blocks = [self._device.allocate_host(nbytes) for nbytes in sizes]
        self._segments.update(enumerate(blocks, self._next))
        self._next += len(blocks)
        self._ledger.host_allocations += len(blocks)
        self._ledger.host_bytes += sum(map(self._device.host_rounding.taken, sizes))
        return spans

    def keep_only(self, segments: Collection[int]) -> None:
        """Let go of all other segments; each is freed with the last view of it."""
        for number in [number for number in self._segments if number not in segments]:
            self._ledger.host_bytes -= self._device.host_rounding.taken(
                self._segments.pop(number).numel()
            )

    def bytes_at(self, span: Span) -> torch.Tensor:
        """The bytes of a span (or of several that touch), 1-D uint8, for copies."""
        self._ledger.views_made += 1
        return self._segments[span.segment][span.offset : span.end]


def own_storage_view(
    raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Make a tensor over the bytes ``raw`` whose storage is just those bytes, from offset 0.

    A plain view would share the whole segment's storage, and ``torch.save`` or ``deepcopy`` of one
    state would write the segment. DLPack gives the slice a storage of its own that shares the
    memory and keeps it alive (and, unlike numpy, knows bfloat16).

    Args:
        raw: 1-D uint8, exactly the bytes of the values.
        dtype: Element type of the result.
        shape: Shape of the result.
        stride: Its strides in elements; dense.
    """
    flat: torch.Tensor = from_dlpack(to_dlpack(raw))
    # Detached, since a view keeps its base: one more user of the storage than there seems to be.
    return flat.view(dtype).as_strided(shape, stride).detach()
