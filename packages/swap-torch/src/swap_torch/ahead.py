# SPDX-License-Identifier: Apache-2.0
"""The moment of a backward pass at which the first loads begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import final
from weakref import WeakMethod, ref

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["BackwardTrigger", "on_gradient"]


def on_gradient(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Let ``hook(param)`` run in the backward pass once ``param.grad`` is there."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


@final
class BackwardTrigger:
    """Calls back when one parameter has its gradient, for the last time before an update.

    With gradient accumulation that is the last of several backward passes: as many gradients are
    waited for as there were before the latest update. The gradient is neither read nor changed.
    FSDP2, which puts gradients in place itself, runs such hooks too.

    Args:
        action: A method, called in the backward pass; held weakly.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = WeakMethod(action)
        self._param: torch.Tensor | None = None
        self._handle: RemovableHandle | None = None
        self._arrived = 0
        self._expected = 0
        """0: not known yet."""

    def update_done(self, param: torch.Tensor | None) -> None:
        """Count anew, for the next update.

        Args:
            param: The parameter to look at; None: none, for now.
        """
        if param is not self._param:
            self._move_to(param)
        else:
            self._expected = self._arrived
        self._arrived = 0

    def gradients_dropped(self) -> None:
        """Count anew: gradients so far are not for the next update."""
        self._arrived = 0

    def _move_to(self, param: torch.Tensor | None) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._param, self._handle, self._expected = param, None, 0
        if param is None:
            return
        weak = ref(self)  # the parameter must not keep the optimizer's host memory

        def hook(_: torch.Tensor) -> None:
            trigger = weak()
            if trigger is not None:
                trigger._gradient_arrived()

        self._handle = on_gradient(param, hook)

    def _gradient_arrived(self) -> None:
        self._arrived += 1
        action = self._action()
        if self._arrived == self._expected and action is not None:
            action()
