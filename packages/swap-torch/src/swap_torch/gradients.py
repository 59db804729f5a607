# SPDX-License-Identifier: Apache-2.0
"""Whether a gradient is still what it was when the backward pass made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from swap_torch.sharding import local_of

__all__ = ["SeenGradient", "first_changed", "versions_of"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def versions_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Change with every write in place, into a DTensor too, of which torch counts the outer one."""
    return tensor._version, local_of(tensor)._version


@final
@dataclass(frozen=True, slots=True)
class SeenGradient:
    """A gradient at the moment when the backward pass was done with it."""

    grad: torch.Tensor
    versions: tuple[int, int]
    bits: torch.Tensor | None
    """0-D int64 on the gradient's device: the sum of its elements, read as integers. DDP replaces
    values without counting a version. None: not taken."""

    @classmethod
    def of(cls, grad: torch.Tensor, *, with_bits: bool) -> SeenGradient:
        """Look at ``grad``; queues one reduction on the current stream if ``with_bits``."""
        return cls(grad, versions_of(grad), _bits(grad) if with_bits else None)

    def is_same_object(self, grad: torch.Tensor | None) -> bool:
        """Tell whether ``grad`` is the gradient, and nobody wrote into it in place."""
        return grad is self.grad and versions_of(self.grad) == self.versions


def first_changed(seen: dict[torch.Tensor, SeenGradient]) -> torch.Tensor | None:
    """The first parameter whose gradient is another one now, or has other values.

    Compares :attr:`SeenGradient.bits` where they were taken, which blocks the host once per device.
    """
    for param, then in seen.items():
        if not then.is_same_object(param.grad):
            return param
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
    for param, then in seen.items():
        if then.bits is not None:
            found = by_device.setdefault(then.bits.device, [])
            found.append((param, then.bits, _bits(then.grad)))
    for found in by_device.values():
        params, before, now = zip(*found, strict=True)
        differ = (torch.stack(before) != torch.stack(now)).tolist()
        if any(differ):
            changed: torch.Tensor = params[differ.index(True)]
            return changed
    return None


def _bits(grad: torch.Tensor) -> torch.Tensor:
    local = local_of(grad.detach())
    values = torch.view_as_real(local) if local.is_complex() else local
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
