# SPDX-License-Identifier: Apache-2.0
"""Two runs of one training, and where they part.

A run is recorded by a framework's adapter; everything here is plain data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from swap_testkit.array import Array, ElementDifference, Tolerance, worst_difference

__all__ = ["Alignment", "Memory", "Mismatch", "RunRecord", "compare_runs"]

_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_SHOWS_NOTHING = "also natively: vacuous, equal values show nothing"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of optimizer states, of one process."""

    idle: int
    """On the device, between updates, at the end."""
    peak: int
    """On the device, at most, at any time of the run."""
    host: int
    """On the host."""


@dataclass(slots=True)
class RunRecord:
    """What one process saw of one run."""

    losses: list[float] = field(default_factory=list)
    """For each step."""
    digests: list[dict[str, str]] = field(default_factory=list)
    """For each step, after it: a fingerprint of every parameter, state and counter, by name."""
    arrays: dict[str, Array] = field(default_factory=dict)
    """The same things themselves, after the last step."""
    parameters: list[str] = field(default_factory=list)
    """Those names that are parameters."""
    step_seconds: list[float] = field(default_factory=list)
    """For each step, the optimizers' part of it."""
    memory: Memory = field(default_factory=lambda: Memory(0, 0, 0))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing in which two runs differ."""

    name: str
    """``loss``, or the tensor: ``exp_avg of layers.0.weight``."""
    step: int
    """The first step (from 0) after which it differs."""
    difference: ElementDifference | None
    """The worst element at the end; None where there is no such pair of elements."""
    note: str = ""
    """What differs instead: missing, another shape or type."""
    rank: int = 0

    def __str__(self) -> str:
        """Tell it in one line."""
        what = str(self.difference) if self.difference is not None else self.note
        return f"rank {self.rank}, from step {self.step} on: {self.name} {what}"


@dataclass(frozen=True, slots=True)
class Alignment:
    """The result of comparing two runs.

    ``mismatches`` are in the order in which they appeared: the first is nearest to the cause.
    """

    training: str
    """What was trained, on how many processes: ``fsdp on 2``."""
    variant: str
    """With what: ``adamw, packed x16``."""
    steps: int
    tolerance: Tolerance
    losses: tuple[tuple[float, float], ...]
    """For each step, native and swapped (of the first rank that has a loss)."""
    compared: int
    """How many tensors and counters were compared, on all ranks."""
    mismatches: tuple[Mismatch, ...]
    native_memory: Memory
    swapped_memory: Memory
    """Of the rank that needs most."""
    native_step_seconds: float
    """Median of the optimizers' part of a step."""
    swapped_step_seconds: float
    seconds: float = 0.0
    """Wall time of everything."""

    @property
    def title(self) -> str:
        """Training and variant."""
        return f"{self.training}, {self.variant}"

    @property
    def aligned(self) -> bool:
        """Whether nothing differs."""
        return not self.mismatches

    def explain(self, most: int = 10) -> str:
        """Tell in a few lines what was compared and what differs."""
        if self.aligned:
            return (
                f"{self.title}: aligned ({self.tolerance}): {self.steps} losses and "
                f"{self.compared} tensors"
            )
        shown = [f"  {mismatch}" for mismatch in self.mismatches[:most]]
        left = len(self.mismatches) - len(shown)
        more = [f"  ... and {left} more"] if left else []
        first = f"{self.title}: NOT aligned ({self.tolerance}), first difference first:"
        return "\n".join([first, *shown, *more])

    def as_json(self) -> dict[str, object]:
        """Plain data for ``json.dumps``."""
        return {**asdict(self), "aligned": self.aligned}


def compare_runs(
    native: RunRecord, swapped: RunRecord, tolerance: Tolerance, rank: int = 0
) -> list[Mismatch]:
    """Find every loss, parameter, state and counter in which two runs of one process differ.

    With a tolerance only the losses of each step and the values at the end are compared. A native
    loss or parameter that is not finite is a mismatch too: NaN equals NaN whatever was lost before.

    Returns:
        The mismatches, by the step in which they first showed.
    """
    found = [*_loss_mismatches(native, swapped, tolerance, rank), *_vacuous(native, rank)]
    for name in dict.fromkeys([*native.arrays, *swapped.arrays]):
        mismatch = _tensor_mismatch(name, native, swapped, tolerance, rank)
        if mismatch is not None:
            found.append(mismatch)
    return sorted(found, key=lambda mismatch: mismatch.step)


def _loss_mismatches(
    native: RunRecord, swapped: RunRecord, tolerance: Tolerance, rank: int
) -> list[Mismatch]:
    pairs = zip(native.losses, swapped.losses, strict=True)
    for step, (one, other) in enumerate(pairs):
        difference = worst_difference(_scalar(one), _scalar(other), tolerance)
        if difference is not None:
            return [Mismatch("loss", step, difference, rank=rank)]
    return []


def _vacuous(native: RunRecord, rank: int) -> Iterator[Mismatch]:
    """The first loss and the first parameter that are not finite in the native run."""
    for step, loss in enumerate(native.losses):
        if not math.isfinite(loss):
            yield Mismatch("loss", step, None, f"is {loss} {_SHOWS_NOTHING}", rank)
            break
    for name in native.parameters:
        array = native.arrays.get(name)
        if array is None or array.dtype not in _FLOATS:
            continue
        places = np.argwhere(~np.isfinite(array.values()))
        if len(places):
            index = tuple(int(i) for i in places[0])
            note = f"is {array.values()[index]} at {list(index)} {_SHOWS_NOTHING}"
            yield Mismatch(name, max(len(native.losses) - 1, 0), None, note, rank)
            break


def _scalar(value: float) -> Array:
    return Array("float64", np.array([value], dtype=np.float64).view(np.uint64))


def _tensor_mismatch(
    name: str, native: RunRecord, swapped: RunRecord, tolerance: Tolerance, rank: int
) -> Mismatch | None:
    step = _first_step(name, native.digests, swapped.digests)
    one, other = native.arrays.get(name), swapped.arrays.get(name)
    if one is None or other is None:
        side = "swapped" if one is None else "native"
        return Mismatch(name, step or 0, None, f"exists only in the {side} run", rank)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        note = f"is {one.dtype} {one.shape} natively, {other.dtype} {other.shape} swapped"
        return Mismatch(name, step or 0, None, note, rank)
    difference = worst_difference(one, other, tolerance)
    if difference is not None:
        last = max(len(native.digests) - 1, 0)
        return Mismatch(name, last if step is None else step, difference, rank=rank)
    if step is not None and tolerance.exact:
        note = f"differed after step {step}, although it is equal at the end"
        return Mismatch(name, step, None, note, rank)
    return None


def _first_step(
    name: str, native: Sequence[Mapping[str, str]], swapped: Sequence[Mapping[str, str]]
) -> int | None:
    for step, (one, other) in enumerate(zip(native, swapped, strict=True)):
        if one.get(name) != other.get(name):
            return step
    return None
