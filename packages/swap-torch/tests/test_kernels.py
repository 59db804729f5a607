# SPDX-License-Identifier: Apache-2.0
"""torch's kernels called directly: where, with which bits, and what if torch changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from swap_torch import SwapOptimizerConfig, adam, kernels

FUSED: dict[str, Any] = {"fused": True}
IMPLEMENTATIONS = [(True, False), (False, True), (False, False)]
OPTIONS = [
    kernels.AdamOptions(*implementation, *flags)
    for implementation, *flags in itertools.product(IMPLEMENTATIONS, *[(True, False)] * 4)
]


@pytest.fixture
def functional(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters in each call of torch's functional for a swapped batch."""
    sizes: list[int] = []

    def counted(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        sizes.append(len(params))
        original(params, *args, **kwargs)

    original = adam.adam
    monkeypatch.setattr(adam, "adam", counted)
    return sizes


@pytest.fixture
def fresh_checks() -> Iterator[None]:
    kernels.agrees.cache_clear()
    yield
    kernels.agrees.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_direct_kernels_agree_with_the_functional(
    fresh_checks: None, options: kernels.AdamOptions, dtype: torch.dtype
) -> None:
    assert kernels.agrees(options, torch.device("cpu"), dtype)


@pytest.mark.parametrize(
    "options", [{}, FUSED, {"foreach": False}], ids=["foreach", "fused", "for-loop"]
)
def test_plain_numbers_take_the_direct_kernels(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    functional: list[int],
    options: dict[str, Any],
) -> None:
    pair = twins([(4,), (5,), (6,)], **options)
    train(pair, 3)
    assert functional == []


def scaled(optimizer: torch.optim.Optimizer) -> None:
    """What a GradScaler does before the step of an optimizer that unscales by itself."""
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "prepare"),
    [
        pytest.param({"lr": torch.tensor(0.01), **FUSED}, None, id="tensor lr"),
        pytest.param({"dtype": [torch.float32, torch.float64], **FUSED}, None, id="two dtypes"),
        pytest.param(FUSED, scaled, id="scaled"),
    ],
)
def test_everything_else_takes_the_functional(
    twins: Callable[..., Any],
    train: Callable[..., None],
    functional: list[int],
    options: dict[str, Any],
    prepare: Callable[[torch.optim.Optimizer], None] | None,
) -> None:
    pair = twins(
        [(4,), (5,), (6,)],
        config=SwapOptimizerConfig(swap_times=1, min_numel=0),
        prepare=prepare,
        **options,
    )
    train(pair, 3)
    assert functional == [3, 3, 3]


@pytest.mark.parametrize("failing", range(3))
def test_a_parameter_that_fails_in_a_for_loop_leaves_those_after_it_as_they_were(
    twins: Callable[..., Any], train: Callable[..., None], functional: list[int], failing: int
) -> None:
    config = SwapOptimizerConfig(swap_times=1, min_numel=0)
    pair = twins([(4,), (5,), (6,)], config=config, foreach=False)
    train(pair, 1)
    pair.give_gradients()
    for optimizer in (pair.native, pair.swapped):
        state = list(optimizer.state.values())[failing]
        good, state["exp_avg"] = state["exp_avg"], torch.zeros(7)
        with pytest.raises(RuntimeError, match="size of tensor"):
            optimizer.step()
        counted = [each["step"].item() for each in optimizer.state.values()]
        assert counted == [2.0] * (failing + 1) + [1.0] * (2 - failing)
        state["exp_avg"] = good
    pair.check()
    train(pair, 2)
    assert functional == []


WRONG: dict[str, Callable[[Any], Any]] = {
    "counters": lambda lists: [1.0] * len(lists.steps),
    "raises": lambda lists: torch.zeros(2) + torch.zeros(3),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_that_do_not_agree_are_not_used(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    fresh_checks: None,
    functional: list[int],
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
) -> None:
    monkeypatch.setattr(kernels, "_values", WRONG[wrong])
    pair = twins([(4,), (5,), (6,)])
    train(pair, 3)
    assert functional == [1] * 9


def test_out_of_memory_is_no_answer(fresh_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    question = OPTIONS[0], torch.device("cpu"), torch.float32
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_examples", full)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            kernels.agrees(*question)
    assert kernels.agrees(*question)


def test_the_answer_is_for_options_device_and_dtype_and_is_found_once(
    twins: Callable[..., Any], train: Callable[..., None], fresh_checks: None
) -> None:
    pair = twins([(4,), (5,), (6,)], **FUSED)
    train(pair, 3)
    assert kernels.agrees.cache_info().misses == 1
    for group in (*pair.native.param_groups, *pair.swapped.param_groups):
        group["weight_decay"] = 0.0
    train(pair, 2)
    assert kernels.agrees.cache_info().misses == 2
