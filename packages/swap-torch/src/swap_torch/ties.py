# SPDX-License-Identifier: Apache-2.0
"""Parameters that share memory: one listed twice, or views that overlap.

Their updates see each other's results, so their order matters, and with kernels that work on many
tensors at once also which of them are in one call. Keeping them in one batch keeps the native bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from swap_torch.adapter import TorchUnit
from swap_torch.sharding import local_of

__all__ = ["tied_units"]


def tied_units(units: Sequence[TorchUnit]) -> dict[int, int]:
    """For each unit, by its gradient's position, the position that names its set of ties.

    Views side by side in one buffer, as in flat parameters, do not overlap and are not tied.
    """
    spans = sorted((_span(unit), unit.grad_index) for unit in units)
    tied: dict[int, int] = {}
    end, name = -1, -1
    for (start, stop), index in spans:
        if start >= end or start == stop:
            name = index
        tied[index] = name
        end = max(end, stop)
    return tied


def _span(unit: TorchUnit) -> tuple[int, int]:
    """First byte of the parameter, and the byte after its last; of no length if it has none."""
    local = local_of(unit.param)
    start = local.data_ptr()
    if local.numel() == 0:
        return start, start
    last = sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
    return start, start + (last + 1) * local.element_size()
