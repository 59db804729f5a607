# SPDX-License-Identifier: Apache-2.0
"""Step counters side by side: one addition, and still the user's own tensors."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig, swap_optimizer
from swap_torch.counters import CounterTable

SHAPES = [(4,), (5,), (6,), (7,)]
FUSED: dict[str, Any] = {"fused": True}


def counters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    return [optimizer.state[param]["step"] for param in params]


def addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    return [counter.data_ptr() for counter in counters(optimizer)]


def in_one_row(optimizer: torch.optim.Optimizer) -> bool:
    found = addresses(optimizer)
    return found == list(range(found[0], found[0] + 4 * len(found), 4))


@pytest.mark.parametrize("native_steps", [0, 2], ids=["born", "from before wrapping"])
def test_counters_lie_side_by_side_each_with_its_own_storage(
    twins: Callable[..., Any], train: Callable[..., None], native_steps: int
) -> None:
    pair = twins(SHAPES, native_steps=native_steps, **FUSED)
    train(pair, 2)
    assert in_one_row(pair.swapped)
    for counter in counters(pair.swapped):
        assert counter.item() == native_steps + 2
        assert counter.untyped_storage().nbytes() == 4
        assert counter.storage_offset() == 0


def test_a_counter_is_saved_and_copied_alone(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins(SHAPES, **FUSED)
    train(pair, 1)
    sizes: list[int] = []
    for optimizer in (pair.native, pair.swapped):
        file = io.BytesIO()
        torch.save(counters(optimizer)[1], file)
        sizes.append(file.getbuffer().nbytes)
    assert sizes[0] == sizes[1]
    kept = copy.deepcopy(counters(pair.swapped))
    train(pair, 1)
    assert [counter.item() for counter in kept] == [1.0] * len(SHAPES)


def test_parameters_that_take_turns_count_each_for_itself(
    twins: Callable[..., Any], train: Callable[..., None], foreach_on_cpu: None
) -> None:
    pair = twins(SHAPES, config=SwapOptimizerConfig(swap_times=1, min_numel=0))
    for mask in ([True, False, True, False], [False, True, True, True], [True] * 4):
        train(pair, 2, mask)
    assert [counter.item() for counter in counters(pair.swapped)] == [4.0, 4.0, 6.0, 4.0]


@pytest.mark.parametrize("options", [{}, FUSED], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda state: state["step"].fill_(40), id="written"),
        pytest.param(lambda state: state.update(step=torch.tensor(40.0)), id="replaced"),
    ],
)
def test_edited_counters_are_used(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    options: dict[str, Any],
    edit: Callable[[dict[str, Any]], object],
) -> None:
    pair = twins(SHAPES, config=SwapOptimizerConfig(swap_times=2, min_numel=0), **options)
    train(pair, 1)
    for optimizer in (pair.native, pair.swapped):
        edit(optimizer.state[optimizer.param_groups[0]["params"][1]])
    train(pair, 2)
    assert [counter.item() for counter in counters(pair.swapped)] == [3.0, 42.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "options", [FUSED, {}, {"foreach": False}], ids=["fused", "foreach", "for-loop"]
)
def test_a_counter_that_two_parameters_share_advances_twice_as_natively(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    options: dict[str, Any],
) -> None:
    pair = twins(SHAPES, config=SwapOptimizerConfig(swap_times=1, min_numel=0), **options)
    train(pair, 1)
    for optimizer in (pair.native, pair.swapped):
        first, second, *_ = optimizer.state.values()
        second["step"] = first["step"] = torch.tensor(1.0)
    train(pair, 2)
    assert [counter.item() for counter in counters(pair.swapped)] == [5.0, 5.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "options", [FUSED, {}, {"foreach": False}], ids=["fused", "foreach", "for-loop"]
)
@pytest.mark.parametrize("loaded", [False, True], ids=["put in place", "loaded"])
@pytest.mark.parametrize("whose", [slice(None), slice(1, 3)], ids=["all", "some"])
def test_integers_count_on_or_are_refused_as_natively(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    options: dict[str, Any],
    loaded: bool,
    whose: slice,
) -> None:
    pair = twins(SHAPES, config=SwapOptimizerConfig(swap_times=1, min_numel=0), **options)
    train(pair, 1)
    for optimizer in (pair.native, pair.swapped):
        saved = optimizer.state_dict()
        entries = saved["state"].values() if loaded else optimizer.state.values()
        for entry in list(entries)[whose]:
            entry["step"] = torch.tensor(1000)
        if loaded:
            optimizer.load_state_dict(saved)
    pair.give_gradients()
    told = []
    for optimizer in (pair.native, pair.swapped):
        try:
            optimizer.step()
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    pair.check()
    assert told[0] == told[1]
    dtypes = [[each.dtype for each in counters(one)] for one in (pair.native, pair.swapped)]
    assert dtypes[0] == dtypes[1]
    if not told[0]:
        train(pair, 2)


def test_rows_go_with_their_last_counter() -> None:
    table = CounterTable()
    entries = [[{"step": torch.tensor(float(i))} for i in range(n)] for n in (3, 4)]
    for each in entries:
        table.gather(each, ["step"])
    rows = [table.row_of([entry["step"] for entry in each]) for each in entries]
    assert [row.tolist() for row in rows if row is not None] == [[0, 1, 2], [0, 1, 2, 3]]
    table.keep_only(entries[1], ["step"])
    assert table.row_of([entry["step"] for entry in entries[0]]) is None
    assert table.row_of([entry["step"] for entry in entries[1]]) is not None


def test_rows_do_not_pile_up_when_counters_are_replaced_again_and_again(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins(SHAPES, **FUSED)
    for value in range(1, 5):
        train(pair, 1)
        assert len(pair.swapped._swap._table.counters._rows) == 1
        for optimizer in (pair.native, pair.swapped):
            for state in optimizer.state.values():
                state["step"] = torch.tensor(float(value))


def test_entries_that_change_places_are_followed(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins([(4,), (4,)], **FUSED)
    train(pair, 2, [True, False])
    train(pair, 1)
    for optimizer in (pair.native, pair.swapped):
        state, (one, other) = optimizer.state, optimizer.param_groups[0]["params"]
        entries = state.pop(one), state.pop(other)
        state[other], state[one] = entries
    train(pair, 2)
    assert [counter.item() for counter in counters(pair.swapped)] == [3.0, 5.0]


def test_nothing_of_a_deleted_optimizer_stays() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = swap_optimizer(
        torch.optim.AdamW([param], fused=True),
        SwapOptimizerConfig(min_numel=0),
        device=CpuAsDevice(),
    )
    optimizer.step()
    counter = optimizer.state[param]["step"]
    table = ref(optimizer._swap._table.counters)  # type: ignore[attr-defined]
    del optimizer
    gc.collect()
    assert table() is None
    assert counter.item() == 1.0  # and whoever holds a counter may read it
