# SPDX-License-Identifier: Apache-2.0
"""Values of a tensor without its framework, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "ElementDifference", "Tolerance", "worst_difference"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far values may be apart, as in :func:`numpy.allclose`. Zero: not a bit."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every bit counts."""
        return self.rtol == 0 and self.atol == 0

    def __str__(self) -> str:
        """Name it for reports."""
        return "exact" if self.exact else f"rtol={self.rtol:g}, atol={self.atol:g}"


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor's values.

    ``bits`` holds them as unsigned integers of the element's size (bfloat16 has no numpy type),
    in the tensor's shape; complex numbers have a last dimension of 2.
    """

    dtype: str
    """The element type in the framework's words, such as ``bfloat16``."""
    bits: NDArray[np.unsignedinteger]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``bits``."""
        return self.bits.shape

    def digest(self) -> str:
        """A short fingerprint of type, shape and every bit."""
        content = blake2b(digest_size=8)
        content.update(f"{self.dtype}{self.shape}".encode())
        content.update(np.ascontiguousarray(self.bits).data)
        return content.hexdigest()

    def values(self) -> NDArray[np.float64]:
        """The values as float64, which holds every other type but large integers exactly."""
        if self.dtype == "bfloat16":
            wide = self.bits.astype(np.uint32) << np.uint32(16)
            return np.asarray(wide.view(np.float32), dtype=np.float64)
        kind = np.dtype(_REAL_PART.get(self.dtype, self.dtype))
        return self.bits.view(kind).astype(np.float64)

    def ordinals(self) -> list[int]:
        """Integers in the order of the values, one apart for neighbouring floats; flattened."""
        size = self.bits.dtype.itemsize * 8
        flat = [int(bits) for bits in self.bits.reshape(-1)]
        if "float" not in self.dtype and "complex" not in self.dtype:
            return flat
        sign = 1 << (size - 1)
        return [-(bits - sign) if bits & sign else bits for bits in flat]


_REAL_PART = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """The element of two arrays that is furthest apart."""

    index: tuple[int, ...]
    native: float
    swapped: float
    ulps: int
    """Representable values between the two, of their type."""
    elements: int
    """How many elements are apart."""

    def __str__(self) -> str:
        """Tell where and how far."""
        return (
            f"at {list(self.index)}: native {self.native!r}, swapped {self.swapped!r} "
            f"({self.ulps} ulps apart; {self.elements} elements differ)"
        )


def worst_difference(
    native: Array, swapped: Array, tolerance: Tolerance
) -> ElementDifference | None:
    """Find the element that is furthest apart, or None if all are within the tolerance.

    Both must have the same type and shape. Exact means the same bits: NaN equals itself and zero
    differs from minus zero.
    """
    different = native.bits != swapped.bits
    if not tolerance.exact:
        one, other = native.values(), swapped.values()
        different &= ~np.isclose(other, one, rtol=tolerance.rtol, atol=tolerance.atol)
    places = np.argwhere(different)
    if not len(places):
        return None
    one_bits = Array(native.dtype, native.bits[different])
    other_bits = Array(swapped.dtype, swapped.bits[different])
    pairs = zip(one_bits.ordinals(), other_bits.ordinals(), strict=True)
    ulps = [abs(a - b) for a, b in pairs]
    worst = max(range(len(ulps)), key=ulps.__getitem__)
    return ElementDifference(
        index=tuple(int(i) for i in places[worst]),
        native=float(one_bits.values()[worst]),
        swapped=float(other_bits.values()[worst]),
        ulps=ulps[worst],
        elements=len(places),
    )
