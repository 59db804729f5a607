# SPDX-License-Identifier: Apache-2.0
"""Whether the gradients of a backward pass are those that ``step()`` gets.

[Note: final gradients]
Only the user knows whether a gradient is final when the backward pass has made it. Clipping by the
global norm, a GradScaler, accumulation over several backward passes and DDP's reduction all change
it later. So the first update that could overlap does not: it compares each gradient that the
backward pass made with the one that ``step()`` gets, and is refused if they differ, before anything
is changed. Later updates compare objects and version counters, which costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

import torch

from swap_core import UnsupportedOptionError
from swap_torch.adapter import TorchSwapAdapter, owner_name
from swap_torch.gradients import SeenGradient, first_changed

__all__ = ["WHY_GRADIENTS_CHANGE", "FinalGradients"]

WHY_GRADIENTS_CHANGE = (
    "clipping by global norm, GradScaler, several backward passes before step(), and DDP change "
    "gradients after the backward pass has made them"
)

_SCALER = ("grad_scale", "found_inf")
"""What GradScaler sets on an optimizer whose kernel unscales."""


@final
class FinalGradients:
    """The gradients made since the latest update. See [Note: final gradients].

    Args:
        adapter: Knows the optimizer.
        trusted: Do not ask whether gradients change after the backward pass has made them.
    """

    def __init__(self, adapter: TorchSwapAdapter, *, trusted: bool) -> None:
        self._adapter = adapter
        self.trusted = trusted
        self.proven = trusted
        """Whether they may be used in the backward pass."""
        self._seen: dict[torch.Tensor, SeenGradient] = {}

    def __contains__(self, param: torch.Tensor) -> bool:
        """Tell whether the gradient of ``param`` was made."""
        return param in self._seen

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """The backward pass has made ``grad``; queues one reduction on the stream until proven."""
        self._seen[param] = SeenGradient.of(grad, with_bits=not self.proven)

    def prove(self) -> None:
        """At the beginning of ``step()``: from now on gradients may be used before it.

        If any were made. Blocks the host once per device.

        Raises:
            UnsupportedOptionError: they are not what was seen.
        """
        changed = self.changed(self._seen)
        if changed:
            self.forget()
            raise UnsupportedOptionError(
                f"swap_optimizer: overlap_backward=True does not fit this training: {changed} "
                f"changed between the backward pass and step() ({WHY_GRADIENTS_CHANGE}). Nothing "
                f"was updated. Leave overlap_backward=False (prefetch='backward' is possible), or "
                f"give 'trusted' if the change does not matter."
            )
        self.proven = bool(self._seen)

    def changed(self, params: Collection[torch.Tensor]) -> str:
        """Name what is not as it was when the gradients of ``params`` were made; "" if all is."""
        param = first_changed({each: then for each, then in self._seen.items() if each in params})
        if param is not None:
            return self.name(param)
        scaled = any(vars(self._adapter.optimizer).get(key) is not None for key in _SCALER)
        return "GradScaler" if scaled else ""

    def name(self, param: torch.Tensor) -> str:
        """The gradient of ``param``, in words."""
        optimizer = self._adapter.optimizer
        for group_index, group in enumerate(optimizer.param_groups):
            for index, member in enumerate(group["params"]):
                if member is param:
                    return f"the gradient of {owner_name(optimizer, group_index, index)}"
        return "the gradient of a parameter"

    def forget(self) -> None:
        """After an update, or when gradients were dropped."""
        self._seen.clear()
