# SPDX-License-Identifier: Apache-2.0
"""This process among the others, and what they do together.

Made of AllReduce and AllGather alone, which MindSpore's CPU build has too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, ops

from swap_testkit.mindspore.launch import FOLDER_VARIABLE, JOINED

__all__ = ["ALONE", "World", "join"]


@dataclass(frozen=True, slots=True)
class World:
    """Where this process is."""

    rank: int
    size: int

    def mean(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The mean over processes of each, in fp32."""
        if self.size == 1:
            return tuple(gradients)
        return tuple(self.sum(each.astype(ms.float32)) / self.size for each in gradients)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return ops.AllReduce()(value) if self.size > 1 else value

    def part(self, value: Tensor) -> Tensor:
        """This process's rows; of what cannot be divided, everything."""
        if not self.divides(value):
            return value
        rows = value.shape[0] // self.size
        first = self.rank * rows
        return Tensor(value.asnumpy()[first : first + rows].copy())

    def whole(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """All processes' rows, for a value of this shape."""
        if tuple(part.shape) == tuple(shape):
            return part
        return ops.AllGather()(part)

    def divides(self, value: Tensor) -> bool:
        """Tell whether rows can be dealt out."""
        return self.size > 1 and len(value.shape) > 0 and value.shape[0] % self.size == 0


ALONE = World(0, 1)
"""One process."""


def join() -> World:
    """Meet the other processes that msrun started, and leave a mark of it for who launched them."""
    from mindspore.communication import get_group_size, get_rank, init

    init()
    world = World(get_rank(), get_group_size())
    if folder := os.environ.get(FOLDER_VARIABLE):
        (Path(folder) / f"{JOINED}{world.rank}").touch()
    return world
