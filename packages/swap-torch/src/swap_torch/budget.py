# SPDX-License-Identifier: Apache-2.0
"""Which states stay on the device because there is room for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch

__all__ = ["Budget"]


@final
class Budget:
    """Lets the states of some parameters stay on the device, up to so many bytes.

    Parameters are taken in the optimizer's order, and one whose states do not fit any more is
    passed over. The first ones are the most useful: their gradients come last in the backward pass,
    so that their update is the one that nothing is left to hide behind; and with what stays
    updated first, there is work during the first load.

    A parameter that was decided on keeps its place: states do not move to and fro.

    Args:
        limit: Bytes, or a fraction (float) of the bytes of all states that could swap.
    """

    def __init__(self, limit: int | float) -> None:
        self._limit = limit
        self._sizes: dict[torch.Tensor, int] = {}
        self._resident: set[torch.Tensor] = set()

    @property
    def limit(self) -> int | float:
        """Bytes, or a fraction."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | float) -> None:
        """Decide anew, within another limit."""
        sizes = self._sizes
        self._limit, self._sizes, self._resident = limit, {}, set()
        self.decide(sizes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the states that stay."""
        return sum(self._sizes[param] for param in self._resident)

    def keeps(self, param: torch.Tensor) -> bool:
        """Tell whether the states of ``param`` stay on the device."""
        return param in self._resident

    def knows(self, param: torch.Tensor) -> bool:
        """Tell whether ``param`` was decided on."""
        return param in self._sizes

    def decide(self, sizes: Mapping[torch.Tensor, int]) -> None:
        """Decide on parameters that are new.

        Args:
            sizes: Bytes of the states that could swap, for each, in order.
        """
        new = {param: nbytes for param, nbytes in sizes.items() if param not in self._sizes}
        self._sizes.update(new)
        left = self._allowed() - self.resident_bytes
        for param, nbytes in new.items():
            if 0 < nbytes <= left:
                self._resident.add(param)
                left -= nbytes

    def keep_only(self, params: Iterable[torch.Tensor]) -> None:
        """Forget parameters that left the optimizer."""
        stay = set(params)
        self._sizes = {param: nbytes for param, nbytes in self._sizes.items() if param in stay}
        self._resident &= stay

    def _allowed(self) -> int:
        if isinstance(self._limit, float):
            return int(self._limit * sum(self._sizes.values()))
        return self._limit
