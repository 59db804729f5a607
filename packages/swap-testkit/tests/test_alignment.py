# SPDX-License-Identifier: Apache-2.0
"""What `compare_runs` finds in two records, and in which order it tells it."""

from __future__ import annotations

import numpy as np
import pytest

from swap_testkit.alignment import Mismatch, RunRecord, compare_runs
from swap_testkit.array import Array, Tolerance

STEPS = 4


def array(*values: float) -> Array:
    return Array("float32", np.array(values, dtype=np.float32).view(np.uint32))


def record() -> RunRecord:
    names = ("a", "b", "c")
    return RunRecord(
        losses=[3.0, 2.0, 1.5, 1.25],
        digests=[{name: f"{name}{step}" for name in names} for step in range(STEPS)],
        arrays={name: array(1.0, 2.0) for name in names},
        parameters=["a", "b"],
    )


def spoil(run: RunRecord, name: str, step: int) -> None:
    """Let a tensor be another one after ``step``, and to the end."""
    run.arrays[name] = array(1.0, 2.5)
    for digests in run.digests[step:]:
        digests[name] += "'"


def compared(swapped: RunRecord, tolerance: Tolerance | None = None) -> list[Mismatch]:
    return compare_runs(record(), swapped, tolerance or Tolerance(), rank=3)


def test_equal_runs_have_no_mismatch() -> None:
    assert compared(record()) == []


def test_mismatches_are_told_by_the_step_in_which_they_began() -> None:
    swapped = record()
    swapped.losses[2] += 0.5
    spoil(swapped, "a", 3)
    spoil(swapped, "c", 1)
    found = compared(swapped)
    assert [(mismatch.name, mismatch.step) for mismatch in found] == [
        ("c", 1),
        ("loss", 2),
        ("a", 3),
    ]
    assert {mismatch.rank for mismatch in found} == {3}
    assert "rank 3, from step 1 on: c at [1]: native 2.0, swapped 2.5" in str(found[0])


def test_without_fingerprints_a_difference_is_of_the_last_step() -> None:
    native, swapped = record(), record()
    native.digests, swapped.digests = [], []
    swapped.arrays["b"] = array(1.0, 2.5)
    (found,) = compare_runs(native, swapped, Tolerance())
    assert (found.name, found.step) == ("b", 0)


def test_a_difference_that_has_gone_at_the_end_is_told() -> None:
    swapped = record()
    swapped.digests[1]["b"] += "'"
    (found,) = compared(swapped)
    assert (found.name, found.step, found.difference) == ("b", 1, None)
    assert "although it is equal at the end" in found.note
    assert compared(swapped, Tolerance(rtol=1e-3)) == []


@pytest.mark.parametrize("side", ["native", "swapped"])
def test_a_tensor_that_only_one_run_has_is_told(side: str) -> None:
    native, swapped = record(), record()
    del (swapped if side == "native" else native).arrays["b"]
    (found,) = compare_runs(native, swapped, Tolerance())
    assert found.name == "b"
    assert found.note == f"exists only in the {side} run"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Array("int32", array(1.0, 2.0).bits), "int32 (2,) swapped"),
        (array(1.0, 2.0, 3.0), "float32 (3,) swapped"),
    ],
)
def test_another_type_or_shape_is_told(other: Array, told: str) -> None:
    swapped = record()
    swapped.arrays["b"] = other
    (found,) = compared(swapped)
    assert found.note == f"is float32 (2,) natively, {told}"


def test_a_difference_within_the_tolerance_is_none() -> None:
    swapped = record()
    swapped.losses[0] += 1e-3
    swapped.arrays["a"] = array(1.0, 2.001)
    assert len(compared(swapped)) == 2
    assert compared(swapped, Tolerance(rtol=1e-2)) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_equal_parameters_that_are_not_finite_show_nothing(value: float, dtype: str) -> None:
    """NaN equals NaN bit by bit, whatever was lost on the way."""
    native, swapped = record(), record()
    bits = array(1.0, value).bits
    if dtype == "bfloat16":
        bits = (bits >> 16).astype(np.uint16)
    native.arrays["b"] = swapped.arrays["b"] = Array(dtype, bits)
    (found,) = compare_runs(native, swapped, Tolerance(), rank=1)
    assert (found.name, found.step, found.rank) == ("b", STEPS - 1, 1)
    assert found.note == f"is {value} at [1] also natively: vacuous, equal values show nothing"


def test_equal_losses_that_are_not_finite_show_nothing() -> None:
    native, swapped = record(), record()
    native.losses[2:] = swapped.losses[2:] = [float("nan")] * 2
    (found,) = compare_runs(native, swapped, Tolerance(rtol=1.0))
    assert (found.name, found.step) == ("loss", 2)
    assert "vacuous" in found.note


def test_states_and_integers_may_have_any_value() -> None:
    """A state may begin at infinity, such as the least that was seen yet."""
    native = record()
    native.arrays["c"] = array(1.0, float("inf"))
    native.arrays["b"] = Array("int32", array(1.0, float("nan")).bits)
    assert compare_runs(native, native, Tolerance()) == []
