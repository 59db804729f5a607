# SPDX-License-Identifier: Apache-2.0
"""Compare two optimizers bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swap_torch.sharding import local_of

__all__ = ["Difference", "assert_same_bits", "differences", "same_bits"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which the swapped optimizer is not the native one."""

    what: str
    """``parameter 3 of group 0`` or ``exp_avg of parameter 3 of group 0``."""
    native: str
    swapped: str

    def __str__(self) -> str:
        """Tell both sides."""
        return f"{self.what}: native {self.native}, swapped {self.swapped}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape, type, strides and bytes, wherever they are.

    Bytes and not values: NaN equals itself, and zero differs from minus zero.
    """
    one, other = local_of(one).detach(), local_of(other).detach()
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    return torch.equal(_bytes(one), _bytes(other))


def differences(
    native: torch.optim.Optimizer, swapped: torch.optim.Optimizer
) -> Iterator[Difference]:
    """Find every parameter, state, counter and option in which two optimizers differ."""
    groups = zip(native.param_groups, swapped.param_groups, strict=True)
    for number, (one, other) in enumerate(groups):
        yield from _option_differences(f"group {number}", one, other)
        for index, (p, q) in enumerate(zip(one["params"], other["params"], strict=True)):
            what = f"parameter {index} of group {number}"
            yield from _value_differences(what, p, q)
            yield from _state_differences(what, native.state.get(p, {}), swapped.state.get(q, {}))


def assert_same_bits(native: torch.optim.Optimizer, swapped: torch.optim.Optimizer) -> None:
    """Raise ``AssertionError`` with the first differences, if there are any."""
    found = [str(difference) for difference in differences(native, swapped)]
    if found:
        more = f"\n... and {len(found) - 10} more" if len(found) > 10 else ""
        raise AssertionError("\n".join(found[:10]) + more)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _option_differences(
    what: str, one: dict[str, object], other: dict[str, object]
) -> Iterator[Difference]:
    for key in sorted((one.keys() | other.keys()) - {"params"}):
        yield from _value_differences(f"{key} of {what}", one.get(key), other.get(key))


def _state_differences(
    what: str, one: dict[str, object], other: dict[str, object]
) -> Iterator[Difference]:
    if list(one) != list(other):
        yield Difference(f"states of {what}", str(list(one)), str(list(other)))
    for key in one.keys() & other.keys():
        yield from _value_differences(f"{key} of {what}", one[key], other[key])


def _value_differences(what: str, one: object, other: object) -> Iterator[Difference]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not same_bits(one, other):
            yield Difference(what, _summary(one), _summary(other))
    elif type(one) is not type(other) or one != other:
        yield Difference(what, repr(one), repr(other))


def _summary(tensor: torch.Tensor) -> str:
    local = local_of(tensor).detach()
    head = local.flatten()[:4].tolist()
    return f"{local.dtype} {tuple(local.shape)} strides {local.stride()} starting {head}"
