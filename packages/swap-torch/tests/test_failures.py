# SPDX-License-Identifier: Apache-2.0
"""Whatever fails inside an update: states stay readable, nothing is held, the next step is right.

After a failure, a parameter is updated if and only if its counter and its moments are. So a native
optimizer that steps just those parameters must have the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch

from swap_core import StateLostError
from swap_testkit import Tamper
from swap_testkit.torch import (
    CopySchedule,
    CpuAsDevice,
    TorchRecordingDevice,
    assert_same_bits,
    differences,
    record_updates,
    same_bits,
)
from swap_torch import SwapOptimizerConfig as Config
from swap_torch import swap_optimizer

MakeTwins: TypeAlias = Callable[..., Any]

SHAPES = [(33, 17), (1024,), (300, 7), (3,), (2049,), (64, 64), (777,)]
GROUPS = [{"params": SHAPES[:4]}, {"params": SHAPES[4:], "lr": 0.1}]
"""The parameter of three elements stays on the device."""


class Layout(NamedTuple):
    """Fields of the config."""

    packed_swap: bool
    swap_times: int
    staging_buffers: int


LAYOUTS = [Layout(True, 1, 2), Layout(True, 3, 2), Layout(True, 5, 3), Layout(False, 3, 2)]
LAYOUT_NAMES = ["one-batch", "packed", "three-arenas", "per-tensor"]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
first_or_later = pytest.mark.parametrize("steps_before", [0, 2])


class PlantedError(Exception):
    """Raised by the tests, and by nothing else."""


class Failing:
    """Twins whose swapped one can be made to fail."""

    def __init__(self, twins: MakeTwins, layout: Layout, steps_before: int) -> None:
        self.inner = CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
        self.device = TorchRecordingDevice(self.inner)
        config = Config(min_numel=4, **layout._asdict())
        self.twins = twins(GROUPS, config=config, device=self.device)
        self.native, self.swapped = self.twins.native, self.twins.swapped
        self.adapter = self.swapped._swap.adapter
        self._pairs = list(self.twins.pairs())
        record_updates(self.swapped, self.device)
        for _ in range(steps_before):
            self.step()
        self.device.log.clear()

    def step(self) -> None:
        """A step of both in which nothing fails."""
        self.twins.give_gradients()
        self.native.step()
        self.swapped.step()
        self.check()

    def check(self) -> None:
        assert_same_bits(self.native, self.swapped)
        self.check_nothing_held()

    def check_nothing_held(self) -> None:
        assert self.inner.held_bytes == 0
        assert self.swapped.swap_report().idle_device_bytes == 0

    def calls_of(self, verb: str) -> int:
        """How many calls of a verb a step makes now, planning included."""
        self.twins.give_gradients()
        self.device.log.clear()
        self.swapped.step()
        return len(self.device.ops(verb))

    def fail(self, error: type[BaseException]) -> BaseException:
        """A step of the swapped one, which must fail."""
        self.twins.give_gradients()
        with pytest.raises(error) as caught:
            self.swapped.step()
        self.device.tamper = None
        # Nothing is in flight: values are there without waiting for them.
        entries = vars(self.swapped)["state"].values()
        found = [value.clone() for entry in entries for value in entry.values()]
        entries = self.swapped.state.values()
        assert all(map(same_bits, found, (v for entry in entries for v in entry.values())))
        return caught.value

    def recover(self) -> int:
        """Check what the failure left, do what remains, step; tell how many had been updated."""
        self.check_nothing_held()
        updated = [self._counter(q) > self._counter(p) for p, q in self._pairs]
        self._step_natively(updated)
        self._check_updated()
        remaining = [not done for done in updated]
        for (_, q), wanted in zip(self._pairs, remaining, strict=True):
            q.grad = q.grad if wanted else None
        if any(remaining):
            self.swapped.step()
            self._step_natively(remaining)
        self.check()
        self.step()
        return sum(updated)

    def _counter(self, param: torch.Tensor) -> int:
        states = {**self.native.state, **self.swapped.state}
        return int(states[param]["step"]) if param in states else 0

    def _step_natively(self, wanted: list[bool]) -> None:
        grads = [p.grad for p, _ in self._pairs]
        for (p, _), want in zip(self._pairs, wanted, strict=True):
            p.grad = p.grad if want else None
        self.native.step()
        for (p, _), grad in zip(self._pairs, grads, strict=True):
            p.grad = grad

    def _check_updated(self) -> None:
        """Same bits; a parameter that was never updated may have states, if they are zero."""
        newborn = set()
        for group_index, group in enumerate(self.native.param_groups):
            others = self.swapped.param_groups[group_index]["params"]
            for index, (p, q) in enumerate(zip(group["params"], others, strict=True)):
                if p not in self.native.state:
                    assert not any(value.any() for value in self.swapped.state.get(q, {}).values())
                    newborn.add(f"states of parameter {index} of group {group_index}")
        found = [d for d in differences(self.native, self.swapped) if d.what not in newborn]
        assert found == []


@contextmanager
def update_raises(
    failing: Failing, nth: int, error: BaseException, *, half: bool
) -> Iterator[None]:
    """Let call ``nth`` of the optimizer's arithmetic raise, before it or half way through it."""
    native, calls = failing.adapter.step_batch, 0

    def step_batch(step: Any, call: Any) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 != nth:
            native(step, call)
            return
        if half:
            count = (len(call.params) + 1) // 2
            grads = range(10**6)[call.grads] if isinstance(call.grads, slice) else call.grads
            states = {key: tensors[:count] for key, tensors in call.states.items()}
            part: dict[str, Any] = {"params": call.params[:count], "grads": tuple(grads)[:count]}
            part |= {"states": states, "counters": call.counters[:count]}
            native(step, dataclasses.replace(call, **part))
        raise error

    failing.adapter.step_batch = step_batch
    try:
        yield
    finally:
        failing.adapter.step_batch = native


@layouts
@first_or_later
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("error", [PlantedError, KeyboardInterrupt])
def test_an_exception_in_an_update(
    error: type[BaseException], half: bool, steps_before: int, layout: Layout, twins: MakeTwins
) -> None:
    updated = []
    for nth in range(Failing(twins, layout, steps_before).calls_of("update")):
        failing = Failing(twins, layout, steps_before)
        with update_raises(failing, nth, error("planted"), half=half):
            failing.fail(error)
        updated.append(failing.recover())
    assert updated == sorted(updated)
    # Call 0 is that of the one state that stays; the others are those of the batches.
    assert updated[0] == half
    assert updated[1] >= 1
    assert updated[-1] >= 4


@layouts
@pytest.mark.parametrize(
    ("verb", "steps_before"),
    [
        *[(verb, steps) for verb in ("restore", "copy_in", "copy_out") for steps in (0, 2)],
        *[("record", 2), ("wait", 2), ("release", 2)],
    ],
)
def test_an_exception_in_each_call_of_a_verb(
    verb: str, steps_before: int, layout: Layout, twins: MakeTwins
) -> None:
    calls = Failing(twins, layout, steps_before).calls_of(verb)
    assert calls >= 1
    for nth in range(calls):
        failing = Failing(twins, layout, steps_before)
        failing.device.tamper = Tamper(verb, nth, PlantedError("planted"))
        failing.fail(PlantedError)
        failing.recover()


# Out of memory.


@layouts
@first_or_later
def test_out_of_memory_in_each_restore(steps_before: int, layout: Layout, twins: MakeTwins) -> None:
    for nth in range(Failing(twins, layout, steps_before).calls_of("restore")):
        failing = Failing(twins, layout, steps_before)
        failing.device.tamper = Tamper("restore", nth, torch.OutOfMemoryError("the device is full"))
        error = failing.fail(torch.OutOfMemoryError)
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        told = ("Nothing is lost", "Raise swap_times", "the device is full")
        assert all(words in str(error) for words in told)
        if steps_before:
            what = "staging arena" if layout.packed_swap else f"batch {nth} of {layout.swap_times}"
            assert what in str(error)
            assert " bytes) of optimizer states" in str(error)
        updated = failing.recover()
        assert updated == 0 if layout.packed_swap else updated >= (nth - 1 if steps_before else 0)


@layouts
@first_or_later
def test_a_device_that_is_too_small_for_a_while(
    steps_before: int, layout: Layout, twins: MakeTwins
) -> None:
    failing = Failing(twins, layout, steps_before)
    largest = 4 * 2 * 64 * 64
    for _ in range(2):
        failing.inner.limit = largest - 1
        assert "swap_times" in str(failing.fail(torch.OutOfMemoryError))
        failing.inner.limit = None
        failing.recover()


# States that are lost, and memory that is not there.


@layouts
def test_a_store_that_fails_twice_says_what_is_lost(layout: Layout, twins: MakeTwins) -> None:
    for nth in range(layout.swap_times):
        failing = Failing(twins, layout, 2)
        before = copy.deepcopy(failing.swapped.state_dict()["state"])
        failing.device.tamper = Tamper("copy_out", nth, PlantedError("planted"), times=2)
        error = failing.fail(StateLostError)
        assert isinstance(error.__cause__, PlantedError)
        told = (f"Batches [{nth}] of {layout.swap_times}", "checkpoint", "planted")
        assert all(words in str(error) for words in told)
        failing.check_nothing_held()
        failing.native.step()
        after = failing.swapped.state_dict()["state"]
        lost = [torch.equal(after[i]["exp_avg"], before[i]["exp_avg"]) for i in after]
        advanced = [int(after[i]["step"] - before[i]["step"]) for i in after]
        assert any(had and counted for had, counted in zip(lost, advanced, strict=True))
        # From a checkpoint everything is right again.
        for p, q in failing.twins.pairs():
            q.data.copy_(p.data)
        failing.swapped.load_state_dict(copy.deepcopy(failing.native.state_dict()))
        failing.check()
        failing.step()


@pytest.mark.parametrize("packed", [True, False])
def test_host_memory_that_is_refused_changes_nothing(packed: bool, twins: MakeTwins) -> None:
    failing = Failing(twins, Layout(packed, 3, 2), 0)
    failing.device.tamper = Tamper("allocate_host", 0, PlantedError("planted"))
    failing.fail(PlantedError)
    assert not failing.swapped.state
    assert failing.device.log == []
    assert failing.recover() == 0
    # At wrapping, with states that exist.
    kind, states = type(failing.native), dict(failing.native.state)
    tensors = [tensor for entry in states.values() for tensor in entry.values()]
    failing.device.tamper = Tamper("allocate_host", 0, PlantedError("planted"))
    with pytest.raises(PlantedError):
        swap_optimizer(failing.native, Config(min_numel=0), device=failing.device)
    assert type(failing.native) is kind
    after = [tensor for entry in failing.native.state.values() for tensor in entry.values()]
    assert all(map(is_, tensors, after))
    failing.step()
