# SPDX-License-Identifier: Apache-2.0
"""What is updated together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from swap_core.slot import SwapSlot

__all__ = ["UpdateUnit"]

ParamT = TypeVar("ParamT")


@dataclass(frozen=True, slots=True)
class UpdateUnit(Generic[ParamT]):
    """One parameter with every state that its update needs: the smallest thing a batch holds.

    Units outlive a step (plans are cached), gradients do not: a unit names the position of its
    gradient in the step's list instead of holding it.
    """

    param: ParamT
    adapter_index: int
    """torch: the parameter group. MindSpore: the parameter's place in the optimizer."""

    grad_index: int
    """Position of the gradient in the list that ``prepare_step`` collects."""

    slots: tuple[SwapSlot, ...]
    """The states that swap, in the order of the optimizer's state keys. Empty: all stay."""

    @property
    def nbytes(self) -> int:
        """Bytes that move in each direction when this unit is updated."""
        return sum(slot.span.nbytes for slot in self.slots)
