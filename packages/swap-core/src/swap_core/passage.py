# SPDX-License-Identifier: Apache-2.0
"""One update under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swap_core.batch import Batch

__all__ = ["Passage"]

EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")


@dataclass(slots=True)
class Passage(Generic[EventT, MemoryT, TransferT]):
    """How far an update is, and how it differs from the plainest one."""

    order: Sequence[Batch[EventT, MemoryT, TransferT]]
    """The batches, as they are updated."""
    resumed: bool = False
    """The first batch was on the device already: the update before kept it."""
    early: bool = False
    """It began before ``run`` was called, as in the backward pass."""
    position: int = 0
    """How many batches were updated."""
    kept: bool = False
    """The last batch stays on the device."""
    tail_left: bool = False
    """The compute stream did not wait for the last store."""

    @property
    def stored(self) -> Sequence[Batch[EventT, MemoryT, TransferT]]:
        """Those that go to the host; the event of the last one covers all, in stream order."""
        return self.order[:-1] if self.kept else self.order
