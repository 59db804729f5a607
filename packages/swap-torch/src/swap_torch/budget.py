# SPDX-License-Identifier: Apache-2.0
"""Which states stay on the device because there is room for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import final

import torch
from torch.nn.parameter import is_lazy

__all__ = ["Budget", "first_that_fit"]


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

    def keep(self, sizes: Mapping[torch.Tensor, int], stay: Set[torch.Tensor]) -> None:
        """Let these parameters' states stay instead, and no others from now on.

        Args:
            sizes: As for :meth:`decide`.
            stay: Those of them whose states stay.
        """
        self._sizes, self._resident = dict(sizes), set(stay)
        self._limit = self.resident_bytes

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
            sizes: Bytes of the states that could swap, for each, in order. Those of lazy modules
                have none yet, and are decided on later.
        """
        new = {
            param: nbytes
            for param, nbytes in sizes.items()
            if param not in self._sizes and not is_lazy(param)
        }
        self._sizes.update(new)
        self._resident |= first_that_fit(new, self._allowed() - self.resident_bytes)

    def keep_only(self, params: Iterable[torch.Tensor]) -> None:
        """Forget parameters that left the optimizer."""
        stay = set(params)
        self._sizes = {param: nbytes for param, nbytes in self._sizes.items() if param in stay}
        self._resident &= stay

    def _allowed(self) -> int:
        if isinstance(self._limit, float):
            return int(self._limit * sum(self._sizes.values()))
        return self._limit


def first_that_fit(sizes: Mapping[torch.Tensor, int], left: int) -> set[torch.Tensor]:
    """Take parameters in order, and pass over those whose bytes do not fit any more."""
    fit = set()
    for param, nbytes in sizes.items():
        if 0 < nbytes <= left:
            fit.add(param)
            left -= nbytes
    return fit
