# SPDX-License-Identifier: Apache-2.0
"""Packed: one contiguous host segment for each batch and dtype, and arenas on the device.

A batch fills its arena from byte 0, dtype after dtype, each state at a multiple of 512 bytes and at
the same distance from the start of its segment on both sides. So a batch is one copy each way for
each of its dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from mindspore import Tensor

from swap_core import (
    HostRounding,
    Ledger,
    PackedPipeline,
    align,
    place,
    runs_of,
    update_order,
)
from swap_mindspore.arena import Arena, Piece
from swap_mindspore.device import AnyMindSporeDevice, Transfer
from swap_mindspore.homes import AnyPipeline, Candidate, Home, Homes, Placed, slot_of

__all__ = ["PackedHomes"]


@dataclass(frozen=True, slots=True)
class _Whole:
    """One segment."""

    dtype: Any
    tensor: Tensor


@final
class PackedHomes(Homes):
    """Contiguous host memory, and arenas that batches use in turn.

    Args:
        device: What allocates.
        arenas: How many arenas, >= 2.
    """

    def __init__(self, device: AnyMindSporeDevice, arenas: int) -> None:
        super().__init__(device)
        self._count = arenas
        self._wholes: list[_Whole] = []
        """By segment number."""
        self._arenas: list[Arena] = []

    def order(self, sizes: Sequence[int]) -> Sequence[int]:
        """The one that takes the least time."""
        return update_order(sizes)

    def nbytes_of(self, candidate: Candidate) -> int:
        """Its bytes, rounded up to the alignment."""
        return align(int(candidate.local.nbytes))

    def allocate(self, groups: Sequence[Sequence[Candidate]], ledger: Ledger) -> list[list[Home]]:
        """Allocate a segment for each group and dtype. States keep their order within a dtype."""
        wholes: list[_Whole] = []
        homes = [self._homes_of(group, wholes) for group in groups]
        self._wholes = wholes
        ledger.host_allocations += len(wholes)
        ledger.host_bytes = sum(whole.tensor.nbytes for whole in wholes)
        return homes

    def place(self, batches: Sequence[Sequence[Home]]) -> list[Placed]:
        """Make the arenas, and for each batch tensors over the one that it uses."""
        pieces = [self._pieces(batch) for batch in batches]
        sizes = [sum(home.slot.span.nbytes for home in batch) for batch in batches]
        ring = min(self._count, len(batches))
        self._arenas = [
            self._device.allocate_arena(
                max(sizes[first::ring]), [piece for each in pieces[first::ring] for piece in each]
            )
            for first in range(ring)
        ]
        views = [iter(arena.views) for arena in self._arenas]
        return [
            self._placed(
                batch, self._arenas[index % ring], [next(views[index % ring]) for _ in each]
            )
            for index, (batch, each) in enumerate(zip(batches, pieces, strict=True))
        ]

    def pipeline(self, ledger: Ledger) -> tuple[AnyPipeline, int]:
        """All arenas at once."""
        arenas = [(arena, arena.nbytes) for arena in self._arenas]
        return PackedPipeline(self._device, ledger, arenas), len(arenas)

    def _homes_of(self, group: Sequence[Candidate], wholes: list[_Whole]) -> list[Home]:
        homes = []
        for dtype in dict.fromkeys(candidate.local.dtype for candidate in group):
            members = [each for each in group if each.local.dtype == dtype]
            sizes = [int(each.local.nbytes) for each in members]
            (spans,), (total,) = place(
                [sizes], rounding=HostRounding.EXACT, first_segment=len(wholes)
            )
            pieces = [
                Piece(span.offset, tuple(each.local.shape), dtype)
                for span, each in zip(spans, members, strict=True)
            ]
            segment = self._device.allocate_segment(dtype, total, pieces)
            wholes.append(_Whole(dtype, segment.whole))
            for each, part, span in zip(members, segment.parts, spans, strict=True):
                homes.append(Home(each, slot_of(each, part, span), part))
        return homes

    def _pieces(self, batch: Sequence[Home]) -> list[Piece]:
        """What tensors a batch needs over its arena: one for each copy, one for each state."""
        pieces = []
        for run in runs_of([home.slot.span for home in batch]):
            whole = self._wholes[run.span.segment]
            assert run.span.nbytes == whole.tensor.nbytes  # a segment is of one batch
            pieces.append(Piece(run.arena_offset, tuple(whole.tensor.shape), whole.dtype))
        offset = 0
        for home in batch:
            pieces.append(Piece(offset, home.slot.shape, home.host.dtype))
            offset += home.slot.span.nbytes
        return pieces

    def _placed(self, batch: Sequence[Home], arena: Arena, views: Sequence[Any]) -> Placed:
        copies = len(views) - len(batch)
        segments = dict.fromkeys(home.slot.span.segment for home in batch)
        transfers = tuple(
            Transfer(view, self._wholes[segment].tensor)
            for view, segment in zip(views[:copies], segments, strict=True)
        )
        nbytes = sum(home.slot.span.nbytes for home in batch)
        return Placed(tuple(views[copies:]), arena, transfers, nbytes)
