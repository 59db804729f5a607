# SPDX-License-Identifier: Apache-2.0
"""Which class an object is of, also if that was never imported, and which one it steps as."""

from __future__ import annotations

import inspect

import torch

__all__ = ["qualified_name", "steps_as"]


def qualified_name(kind: type) -> str:
    """Module and name of a class, by which it is known without being imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


def steps_as(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> bool:
    """Tell whether the optimizer's class runs the arithmetic of ``base`` unchanged.

    torch patches ``step`` with a hook wrapper on the class of each optimizer that is made, so the
    functions are compared underneath it.
    """
    kind = type(optimizer)
    same_step = inspect.unwrap(kind.step) is inspect.unwrap(base.step)
    return same_step and _defined(kind, "_init_group") is _defined(base, "_init_group")


def _defined(kind: type, name: str) -> object:
    """The attribute ``name`` as the first class in the method resolution order defines it."""
    return next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), None)
