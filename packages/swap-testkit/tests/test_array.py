# SPDX-License-Identifier: Apache-2.0
"""Values as bits: fingerprints, distances, tolerances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap_testkit.array import Array, Tolerance, worst_difference
from swap_testkit.torch.record import array_of

EXACT = Tolerance()
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.int64, torch.int32, torch.bool])
def test_equal_tensors_have_equal_digests_and_no_difference(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4).to(dtype)
    one, other = array_of(values), array_of(values.t().contiguous().t())
    assert one.digest() == other.digest()
    assert worst_difference(one, other, EXACT) is None


def test_a_digest_tells_type_and_shape_apart() -> None:
    zeros = torch.zeros(4)
    same_bits = [zeros, zeros.reshape(2, 2), zeros.to(torch.int32)]
    assert len({array_of(tensor).digest() for tensor in same_bits}) == 3


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_ulp_is_one_ulp_in_every_type(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -2.5, 0.0], dtype=dtype)
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
    other = one.clone()
    other.view(ints)[1] += 1
    difference = worst_difference(array_of(one), array_of(other), EXACT)
    assert difference is not None
    assert (difference.index, difference.ulps, difference.elements) == ((1,), 1, 1)
    assert difference.native == -2.5
    assert difference.swapped == float(other[1])
    assert array_of(one).digest() != array_of(other).digest()


def test_zero_and_minus_zero_differ_by_no_ulp_but_differ() -> None:
    difference = worst_difference(
        array_of(torch.tensor([0.0])), array_of(torch.tensor([-0.0])), EXACT
    )
    assert difference is not None
    assert difference.ulps == 0


def test_nan_equals_itself() -> None:
    nan = array_of(torch.tensor([float("nan")]))
    assert worst_difference(nan, nan, EXACT) is None


@given(
    st.floats(width=32, allow_nan=False),
    st.floats(width=32, allow_nan=False),
)
def test_ordinals_are_in_the_order_of_the_values(a: float, b: float) -> None:
    array = Array("float32", np.array([a, b], dtype=np.float32).view(np.uint32))
    first, second = array.ordinals()
    assert (first < second) == (a < b)


def test_the_worst_element_is_found_and_all_are_counted() -> None:
    one = torch.ones(2, 3)
    other = one.clone()
    other[0, 1] += 1e-6
    other[1, 2] += 1e-3
    difference = worst_difference(array_of(one), array_of(other), EXACT)
    assert difference is not None
    assert difference.index == (1, 2)
    assert difference.elements == 2
    assert "[1, 2]" in str(difference)


def test_a_tolerance_lets_small_differences_pass_and_says_its_name() -> None:
    one, other = array_of(torch.ones(2)), array_of(torch.tensor([1.0, 1.0 + 1e-6]))
    assert worst_difference(one, other, Tolerance(rtol=1e-5)) is None
    assert worst_difference(one, other, Tolerance(rtol=1e-8)) is not None
    assert str(Tolerance(rtol=1e-5)) == "rtol=1e-05, atol=0"
    assert str(EXACT) == "exact"


def test_bfloat16_values_are_read_right() -> None:
    values = torch.tensor([1.5, -0.15625, 3e38], dtype=torch.bfloat16)
    assert array_of(values).values().tolist() == values.double().tolist()
