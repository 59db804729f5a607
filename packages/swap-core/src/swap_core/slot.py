# SPDX-License-Identifier: Apache-2.0
"""The identity of one swapped state, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Residency", "Span", "SwapSlot"]


class Residency(Enum):
    """Where the current values of a batch of states are.

    States move batch by batch, so a batch carries this and each of its states has it. Only the
    ``to_*`` methods of :class:`swap_core.batch.Batch` change it.
    """

    HOST = "host"
    """The host bytes are current. No device memory. The host may read and write them."""

    LOADING = "loading"
    """The host bytes are current; device memory exists and the load stream fills it. Valid on
    another stream once that stream waited for the batch's ``loaded`` event. The host may read,
    not write."""

    DEVICE = "device"
    """The device bytes are current and belong to the compute stream; the host bytes are stale."""

    STORING = "storing"
    """The store stream copies device bytes to the host. The host bytes are valid after the
    batch's ``stored`` event; until a stream waited for it, the device memory must not be freed
    or loaded into."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of host memory: ``nbytes`` bytes at ``offset`` of segment number ``segment``."""

    segment: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte after the span, in its segment."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class SwapSlot:
    """One optimizer state that swaps. Pure data: it owns no memory."""

    owner: str
    """The parameter, in the words of messages and reports: ``group 0, parameter 3 (name)``."""

    key: str
    """The state's name in the optimizer, such as ``exp_avg``."""

    shape: tuple[int, ...]
    """Shape of the local tensor (of a sharded parameter: this rank's shard)."""

    dtype: str
    """Element type, such as ``float32``."""

    nbytes: int
    """Bytes of the values; the span is this, rounded up to the alignment of the layout."""

    span: Span
    """The host bytes that hold the state between updates."""
