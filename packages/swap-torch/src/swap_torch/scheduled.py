# SPDX-License-Identifier: Apache-2.0
"""``step`` of an optimizer that a learning rate scheduler looks at."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import ref

from torch.optim import Optimizer

__all__ = ["step_seen_by_scheduler"]


def step_seen_by_scheduler(optimizer: Optimizer) -> Callable[..., float | None]:
    """Bind ``step`` anew as a learning rate scheduler did before wrapping.

    A scheduler replaces ``optimizer.step`` on the instance, by a function around the *old class's*
    step, to see whether it was called (``_opt_called``). Left in place, it would run the native
    step; dropped, the scheduler would warn that it is called before the optimizer.
    """
    step = type(optimizer).step
    weak = ref(optimizer)  # as the scheduler does: no cycle that keeps states alive

    @wraps(step)
    def wrapper(*args: Callable[[], float], **kwargs: Callable[[], float]) -> float | None:
        owner = weak()
        if owner is None:
            raise ReferenceError("step() of an optimizer that is gone")
        owner._opt_called = True  # type: ignore[attr-defined]
        return step(owner, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return wrapper
