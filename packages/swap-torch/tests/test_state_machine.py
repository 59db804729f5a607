# SPDX-License-Identifier: Apache-2.0
"""Random histories: whatever users do between updates, and whatever fails in them.

A native twin does the same. Where an update of the swapped one fails, the native one steps just
those parameters whose counters the failed update advanced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swap_testkit import Tamper
from swap_testkit.torch import (
    CopySchedule,
    CpuAsDevice,
    TorchRecordingDevice,
    assert_same_bits,
)
from swap_torch import SwapOptimizerConfig, swap_optimizer

KEYS = ["exp_avg", "exp_avg_sq"]
SIZES = [1, 3, 64, 127, 128, 129, 400]
VERBS = ["restore", "copy_in", "copy_out"]
MANY = 8
"""More parameters than a history has, for masks and positions."""
masks = st.sampled_from([[True] * MANY, [True, False] * (MANY // 2), [False, True] * (MANY // 2)])
"""Few, so that they come back: then the plans of earlier steps are used, if they still fit."""
positions = st.integers(0, MANY - 1)


class PlantedError(Exception):
    """Raised by the machine, and by nothing else."""


class Histories(RuleBasedStateMachine):
    """Two optimizers with one history."""

    @initialize(
        packed_swap=st.booleans(),
        swap_times=st.integers(1, 5),
        staging_buffers=st.integers(2, 3),
        min_numel=st.sampled_from([0, 64]),
        schedule=st.sampled_from(CopySchedule),
        sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
        wrapped_after=st.integers(0, 1),
        amsgrad=st.booleans(),
    )
    def start(
        self,
        schedule: CopySchedule,
        sizes: list[int],
        wrapped_after: int,
        amsgrad: bool,
        **config: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.inner = CpuAsDevice(schedule=schedule, poison=True)
        self.device = TorchRecordingDevice(self.inner)
        self.keys = [*KEYS, "max_exp_avg_sq"] if amsgrad else KEYS
        params = [self._twins(size) for size in sizes]
        self.native, self.swapped = (
            torch.optim.AdamW([pair[side] for pair in params], lr=0.1, amsgrad=amsgrad)
            for side in (0, 1)
        )
        for _ in range(wrapped_after):
            self.step([True] * MANY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nothing may be large enough to swap
            swap_optimizer(self.swapped, SwapOptimizerConfig(**config), device=self.device)

    # What trainers do.

    @rule(mask=masks)
    def step(self, mask: list[bool]) -> None:
        self._give_gradients(mask)
        self.native.step()
        self.swapped.step()

    @rule(size=st.sampled_from(SIZES), lr=st.floats(0.001, 0.5))
    @precondition(lambda self: len(self._pairs()) < MANY)
    def add_group(self, size: int, lr: float) -> None:
        for optimizer, param in zip((self.native, self.swapped), self._twins(size), strict=True):
            optimizer.add_param_group({"params": [param], "lr": lr})

    @rule(position=positions)
    def freeze_or_unfreeze(self, position: int) -> None:
        for param in self._pair(position):
            param.requires_grad_(not param.requires_grad)

    @rule(lr=st.floats(0.001, 0.5), decay=st.floats(0, 0.5))
    def change_hyperparameters(self, lr: float, decay: float) -> None:
        for optimizer in (self.native, self.swapped):
            optimizer.param_groups[-1].update(lr=lr, weight_decay=decay)

    @rule()
    def load_own_state_dict(self) -> None:
        for optimizer in (self.native, self.swapped):
            optimizer.load_state_dict(optimizer.state_dict())

    # What they do to states.

    @rule(position=positions)
    def read(self, position: int) -> None:
        native, swapped = self._entries(position)
        assert {k: v.tolist() for k, v in native.items()} == {
            k: v.tolist() for k, v in swapped.items()
        }

    @rule(position=positions, key=st.integers(0, 2), factor=st.floats(0, 2))
    def edit_in_place(self, position: int, key: int, factor: float) -> None:
        for entry in self._entries(position):
            if entry:
                entry[self.keys[key % len(self.keys)]].mul_(factor)

    @rule(position=positions, key=st.integers(0, 2), zero=st.booleans())
    def replace(self, position: int, key: int, zero: bool) -> None:
        for entry in self._entries(position):
            if entry:
                name = self.keys[key % len(self.keys)]
                entry[name] = torch.zeros_like(entry[name]) if zero else entry[name].clone()

    @rule(position=positions, other=positions, key=st.integers(0, 2))
    def exchange(self, position: int, other: int, key: int) -> None:
        name = self.keys[key % len(self.keys)]
        for one, two in zip(self._entries(position), self._entries(other), strict=True):
            if one and two and one[name].shape == two[name].shape:
                one[name], two[name] = two[name], one[name]

    @rule(position=positions, empty=st.booleans())
    def forget(self, position: int, empty: bool) -> None:
        for optimizer, param in zip((self.native, self.swapped), self._pair(position), strict=True):
            if empty and param in optimizer.state:
                optimizer.state[param].clear()
            optimizer.state.pop(param, None)

    # What fails.

    @rule(
        mask=masks, verb=st.sampled_from(["restore", "copy_in", "copy_out"]), nth=st.integers(0, 6)
    )
    def fail_in_the_device(self, mask: list[bool], verb: str, nth: int) -> None:
        self.device.tamper = Tamper(verb, nth, PlantedError())
        self._step_that_may_fail(mask)
        self.device.tamper = None

    @rule(mask=masks, nth=st.integers(0, 6), after=st.booleans())
    def fail_in_the_update(self, mask: list[bool], nth: int, after: bool) -> None:
        adapter = self.swapped._swap.adapter
        native, calls = adapter.step_batch, []

        def step_batch(step: Any, call: Any) -> None:
            calls.append(call)
            if len(calls) != nth + 1 or after:
                native(step, call)
            if len(calls) == nth + 1:
                raise PlantedError

        adapter.step_batch = step_batch
        self._step_that_may_fail(mask)
        adapter.step_batch = native

    @invariant()
    def same_bits_and_nothing_held(self) -> None:
        assert_same_bits(self.native, self.swapped)
        assert self.inner.held_bytes == 0
        assert self.swapped._swap.ledger.device_bytes == 0

    # Helpers.

    def _twins(self, size: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        values = torch.randn(size, generator=self.generator)
        return torch.nn.Parameter(values), torch.nn.Parameter(values.clone())

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        native, swapped = (
            [param for group in optimizer.param_groups for param in group["params"]]
            for optimizer in (self.native, self.swapped)
        )
        return list(zip(native, swapped, strict=True))

    def _pair(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = self._pairs()
        return pairs[position % len(pairs)]

    def _entries(self, position: int) -> tuple[dict[str, Any], dict[str, Any]]:
        p, q = self._pair(position)
        return self.native.state.get(p, {}), self.swapped.state.get(q, {})

    def _give_gradients(self, mask: list[bool]) -> None:
        for (p, q), wanted in zip(self._pairs(), mask, strict=False):
            grad = torch.randn(p.shape, generator=self.generator)
            wanted = wanted and p.requires_grad
            p.grad, q.grad = (grad, grad.clone()) if wanted else (None, None)

    def _step_that_may_fail(self, mask: list[bool]) -> None:
        self._give_gradients(mask)
        before = [self._counter(q) for _, q in self._pairs()]
        try:
            self.swapped.step()
        except PlantedError:
            for (p, q), count in zip(self._pairs(), before, strict=True):
                updated = self._counter(q) > count
                p.grad = p.grad if updated else None
                if not count and not updated:
                    # A first update that failed leaves zeros, as it does natively.
                    assert not any(map(torch.any, self.swapped.state.pop(q, {}).values()))
        self.native.step()

    def _counter(self, param: torch.Tensor) -> int:
        entry = self.swapped.state.get(param)
        return int(entry["step"]) if entry else 0


@pytest.mark.filterwarnings("error")
def test_random_histories() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=200,
            stateful_step_count=25,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", ["by hand", "by loading"])
def test_states_that_change_places(how: str, packed: bool, twins: Callable[..., Any]) -> None:
    """Each of two states is now where the other one was: neither is overwritten by the other."""
    config = SwapOptimizerConfig(min_numel=0, packed_swap=packed)
    pair = twins([(30,), (30,), (30,)], config=config)
    for _ in range(2):
        pair.give_gradients()
        for optimizer in (pair.native, pair.swapped):
            optimizer.step()
            if how == "by hand":
                one, other, _ = optimizer.state.values()
                one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
            else:
                loaded = optimizer.state_dict()
                states = loaded["state"]
                states[0], states[1], states[2] = states[1], states[2], states[0]
                optimizer.load_state_dict(loaded)
        pair.give_gradients()
        pair.native.step()
        pair.swapped.step()
        pair.check()
