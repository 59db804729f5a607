# SPDX-License-Identifier: Apache-2.0
"""Compare two optimizers bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swap_torch.forms import is_wrapper, memories_of
from swap_torch.sharding import local_of

__all__ = ["Difference", "assert_same_bits", "bytes_of", "differences", "same_bits"]


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

    Bytes and not values: NaN equals itself, and zero differs from minus zero. Two wrappers, such as
    quantized states, must be of the same class and hold the same bits.
    """
    one, other = local_of(one), local_of(other)
    if _kind(one) != _kind(other) or one.stride() != other.stride():
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def differences(
    native: torch.optim.Optimizer, swapped: torch.optim.Optimizer
) -> Iterator[Difference]:
    """Find every parameter, state, counter and option in which two optimizers differ."""
    groups, others = native.param_groups, swapped.param_groups
    if len(groups) != len(others):
        yield Difference("number of groups", str(len(groups)), str(len(others)))
    for number, (one, other) in enumerate(zip(groups, others, strict=False)):
        yield from _option_differences(f"group {number}", one, other)
        counts = len(one["params"]), len(other["params"])
        if counts[0] != counts[1]:
            yield Difference(f"parameters of group {number}", str(counts[0]), str(counts[1]))
        for index, (p, q) in enumerate(zip(one["params"], other["params"], strict=False)):
            what = f"parameter {index} of group {number}"
            yield from _value_differences(what, p, q)
            yield from _state_differences(what, native.state.get(p, {}), swapped.state.get(q, {}))


def assert_same_bits(native: torch.optim.Optimizer, swapped: torch.optim.Optimizer) -> None:
    """Raise ``AssertionError`` with the first differences, if there are any."""
    found = [str(difference) for difference in differences(native, swapped)]
    if found:
        more = f"\n... and {len(found) - 10} more" if len(found) > 10 else ""
        raise AssertionError("\n".join(found[:10]) + more)


def bytes_of(local: torch.Tensor) -> torch.Tensor:
    """The bytes of a local tensor, 1-D uint8 on the CPU; of a wrapper those inside it, in order."""
    memories = [memory.detach().cpu().resolve_conj() for memory in memories_of(local)]
    return torch.cat([memory.contiguous().view(-1).view(torch.uint8) for memory in memories])


def _kind(local: torch.Tensor) -> tuple[torch.Size, torch.dtype, type | None]:
    return local.shape, local.dtype, type(local) if is_wrapper(local) else None


def _option_differences(
    what: str, one: dict[str, object], other: dict[str, object]
) -> Iterator[Difference]:
    for key in dict.fromkeys([*one, *other]):
        if key == "params":
            continue
        if key not in one or key not in other:
            yield Difference(f"{key} of {what}", _presence(key in one), _presence(key in other))
        else:
            yield from _value_differences(f"{key} of {what}", one[key], other[key])


def _presence(there: bool) -> str:
    return "is there" if there else "is missing"


def _state_differences(
    what: str, one: dict[str, object], other: dict[str, object]
) -> Iterator[Difference]:
    if list(one) != list(other):
        yield Difference(f"states of {what}", str(list(one)), str(list(other)))
    for key in one:
        if key in other:
            yield from _value_differences(f"{key} of {what}", one[key], other[key])


def _value_differences(what: str, one: object, other: object) -> Iterator[Difference]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not same_bits(one, other):
            index = _first_different(one, other)
            yield Difference(what, _summary(one, index), _summary(other, index))
    # By their text, in which NaN equals itself and zero differs from minus zero.
    elif type(one) is not type(other) or repr(one) != repr(other):
        yield Difference(what, repr(one), repr(other))


def _first_different(one: torch.Tensor, other: torch.Tensor) -> int:
    """The first element (of a wrapper: byte) that differs; 0 where the layouts do already."""
    one, other = local_of(one), local_of(other)
    if _kind(one) != _kind(other):
        return 0
    different = (bytes_of(one) != bytes_of(other)).nonzero()
    size = 1 if is_wrapper(one) else one.element_size()
    return int(different[0]) // size if len(different) else 0


def _summary(tensor: torch.Tensor, index: int) -> str:
    local = local_of(tensor)
    layout = f"{local.dtype} {tuple(local.shape)} strides {local.stride()}"
    if is_wrapper(local):
        part = bytes_of(local)[index : index + 4].tolist()
        return f"{type(local).__name__} {layout} with {part} from byte {index} on"
    part = local.detach().flatten()[index : index + 4].tolist()
    return f"{layout} with {part} from element {index} on"
