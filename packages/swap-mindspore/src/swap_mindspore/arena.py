# SPDX-License-Identifier: Apache-2.0
"""Memory of the packed pipeline: one contiguous piece, and tensors over parts of it.

[Note: tensors over an arena]
An update writes into the Parameters of an arena, which must be tensors over its memory. How such
a tensor is made differs: on Ascend it is a view of a byte tensor; on the CPU, where MindSpore's
writes into a view change nothing, it is a tensor over a numpy array. Either way the Parameters are
made once, and while the arena holds no memory their storages have 0 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor

__all__ = ["Arena", "Piece", "Segment", "itemsize_of"]

_ITEMSIZES = {ms.bfloat16: 2, ms.float16: 2, ms.float32: 4, ms.float64: 8}


class Piece(NamedTuple):
    """A tensor over a part of contiguous memory."""

    offset: int
    """In bytes; a multiple of :data:`swap_core.ALIGNMENT`."""
    shape: tuple[int, ...]
    dtype: object

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * itemsize_of(self.dtype)


class Segment(NamedTuple):
    """Contiguous host memory of one dtype, and tensors over pieces of it.

    ``whole`` is one-dimensional and what is copied; ``parts`` are what the optimizer shows.
    """

    whole: Tensor
    parts: tuple[Tensor, ...]


class Arena(ABC):
    """Device memory that several batches use in turn. See [Note: tensors over an arena].

    Args:
        nbytes: Bytes while it is held.
        pieces: One for each Parameter; those of different batches overlap.
    """

    views: tuple[Parameter, ...]
    """One for each piece. Their storages have 0 bytes while the arena holds no memory."""

    def __init__(self, nbytes: int, pieces: Sequence[Piece]) -> None:
        self.nbytes = nbytes
        self.pieces = tuple(pieces)

    @abstractmethod
    def fill(self) -> None:
        """Take memory; its contents are undefined.

        Raises:
            MemoryError: there is none.
        """

    @abstractmethod
    def empty(self) -> None:
        """Give the memory back, if there is any."""


def itemsize_of(dtype: object) -> int:
    """Bytes of one element of a floating point type."""
    return _ITEMSIZES[dtype]
