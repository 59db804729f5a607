# SPDX-License-Identifier: Apache-2.0
"""Parameters without elements, which make torch update a part of a group as it does the whole.

[Note: fillers]
torch's foreach implementations choose for the whole list of one device and dtype: SGD updates its
momenta one by one if one of them does not exist yet, and updates parameters one by one if one
gradient is sparse. Results differ in the last bits (bfloat16, say). A part that has no such
parameter, of a group that has one, gets a filler that is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["Filler", "Kind", "Oddity", "fillers_for", "kind_of"]

Kind: TypeAlias = tuple[torch.device, torch.dtype]
"""What torch sorts the parameters of a list by."""

Oddity: TypeAlias = Literal["sparse", "new"]
"""What one parameter of a list can be: has a sparse gradient, or has no momentum yet."""


@dataclass(frozen=True, slots=True)
class Filler:
    """A parameter that is updated and then forgotten."""

    param: torch.nn.Parameter
    entry: dict[str, Any]
    """Its states."""


def kind_of(param: torch.Tensor) -> Kind:
    """Device and dtype of a parameter."""
    return param.device, param.dtype


def fillers_for(
    params: Iterable[torch.Tensor],
    odd: Mapping[Oddity, Set[Kind]],
    states: Mapping[str, bool],
    step: torch.Tensor | None = None,
) -> list[Filler]:
    """Make what a part of a group lacks.

    Args:
        params: Of the part.
        odd: The kinds of the group's parameters of which one is so.
        states: Names of states that a parameter has, and whether they are sparse as its gradient.
        step: A counter, if it has one.
    """
    likes = {kind_of(param): param for param in params}
    return [
        _filler(like, oddity, states, step)
        for oddity, kinds in odd.items()
        for kind, like in likes.items()
        if kind in kinds
    ]


def _filler(
    like: torch.Tensor, oddity: Oddity, states: Mapping[str, bool], step: torch.Tensor | None
) -> Filler:
    param = torch.nn.Parameter(like.detach().new_empty(0))
    dense = param.detach().new_empty(0)
    param.grad = dense.to_sparse() if oddity == "sparse" else dense
    entry: dict[str, Any] = {} if step is None else {"step": step.clone()}
    if oddity != "new":
        for key, as_gradient in states.items():
            entry[key] = (param.grad if as_gradient else dense).clone()
    return Filler(param, entry)
