# SPDX-License-Identifier: Apache-2.0
"""Which states swap, which stay, and that the report says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from swap_core import StayReason, UnknownStateKeyError
from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer

KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(KEYS, n)]
SHAPES = [(3, 5), (), (40,), (200,)]


def stays(optimizer: Any) -> dict[str, StayReason | None]:
    """For each state, by ``position.key``, why it stays."""
    states = optimizer.swap_report().states
    owners = list(dict.fromkeys(state.owner for state in states))
    return {f"{owners.index(state.owner)}.{state.key}": state.stays for state in states}


def aligned(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
@pytest.mark.parametrize("keys", [None, *SUBSETS], ids=lambda keys: "+".join(keys or ["all"]))
def test_subsets_of_the_keys(
    twins: Callable[..., Any],
    train: Callable[..., None],
    keys: tuple[str, ...] | None,
    packed: bool,
) -> None:
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
    config = SwapOptimizerConfig(
        state_keys=keys, min_numel=2, swap_times=2, packed_swap=packed, staging_buffers=3
    )
    pair = twins(SHAPES, Adam, dtype=dtypes, config=config, amsgrad=True)
    train(pair, 3)
    selected = keys or KEYS
    expected: dict[str, StayReason | None] = {}
    for position, key in itertools.product(range(4), KEYS):
        too_small = StayReason.TOO_SMALL if position == 1 else None
        expected[f"{position}.{key}"] = too_small if key in selected else StayReason.NOT_SELECTED
    assert stays(pair.swapped) == expected

    report = pair.swapped.swap_report()
    swapped = [15 * 4, 40 * 2, 200 * 8]
    assert report.swapped_bytes == len(selected) * sum(swapped)
    assert report.resident_bytes == (3 - len(selected)) * sum(swapped) + 3 * 4
    assert report.host_bytes == pair.device.host_bytes == len(selected) * sum(map(aligned, swapped))
    each = report.host_bytes if packed else report.swapped_bytes
    assert sum(report.batch_bytes) == each
    assert report.ledger.bytes_loaded == report.ledger.bytes_stored == 3 * each
    assert [(s.shape, s.dtype, s.nbytes) for s in report.states if s.key == "exp_avg_sq"] == [
        ((3, 5), "float32", 60),
        ((), "float32", 4),
        ((40,), "bfloat16", 80),
        ((200,), "float64", 1600),
    ]


def test_groups_have_the_keys_of_their_options(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    groups = [{"params": [(4,)], "amsgrad": True}, {"params": [(5,)]}]
    config = SwapOptimizerConfig(min_numel=0, state_keys=("max_exp_avg_sq",))
    pair = twins(groups, config=config)
    train(pair, 3)
    expected = {"0.max_exp_avg_sq": None}
    for state in ("0.exp_avg", "0.exp_avg_sq", "1.exp_avg", "1.exp_avg_sq"):
        expected[state] = StayReason.NOT_SELECTED
    assert stays(pair.swapped) == expected


@pytest.mark.parametrize("key", ["max_exp_avg_sq", "momentum_buffer", "master_param", "step"])
def test_key_that_the_optimizer_does_not_have(key: str) -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(4))])
    config = SwapOptimizerConfig(state_keys=("exp_avg", key))
    message = rf"'{key}', which this torch.optim.AdamW does not have.* exp_avg, exp_avg_sq"
    with pytest.raises(UnknownStateKeyError, match=message):
        swap_optimizer(optimizer, config, device=CpuAsDevice())
    assert not is_swap_optimizer(optimizer)


def test_report_before_and_after_birth(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins([(40,), (3,)], config=SwapOptimizerConfig(min_numel=4))
    before = pair.swapped.swap_report()
    assert [state.born for state in before.states] == [False] * 4
    assert (before.swapped_bytes, before.resident_bytes, before.host_bytes) == (0, 0, 0)
    assert (before.batches, before.last_step) == (0, None)
    predicted = stays(pair.swapped)
    assert predicted["0.exp_avg"] is None
    assert predicted["1.exp_avg"] is StayReason.TOO_SMALL
    train(pair, 1, [True, False])
    half = pair.swapped.swap_report()
    assert [state.born for state in half.states] == [True, True, False, False]
    train(pair, 1)
    after = pair.swapped.swap_report()
    assert stays(pair.swapped) == predicted
    assert (after.swapped_bytes, after.resident_bytes) == (2 * 160, 2 * 12)
    assert (before.batches, after.batches) == (0, 1)  # a snapshot does not change
    assert after.last_step is not None
    assert "2 of the states: it has fewer elements than min_numel" in str(after)


def test_named_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = AdamW(model.named_parameters())
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=CpuAsDevice())
    owners = [state.owner for state in optimizer.swap_report().states[::2]]
    assert owners[0] == "group 0, parameter 0 (0.weight)"
    assert owners[3] == "group 0, parameter 3 (1.bias)"


# Every reason to stay. NOT_SELECTED and TOO_SMALL are above.


def test_complex_states_stay(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    pair = twins([(4,), (5,)], dtype=[torch.complex64, torch.float32])
    train(pair, 2)
    assert stays(pair.swapped)["0.exp_avg"] is StayReason.NOT_FLOATING
    assert stays(pair.swapped)["1.exp_avg"] is None


def test_states_of_cpu_parameters_stay() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(4000))])
    with pytest.warns(UserWarning, match="none of the 2 states.*2 because its parameter is on the"):
        swap_optimizer(optimizer)
    assert set(stays(optimizer).values()) == {StayReason.ON_CPU}


def test_states_of_meta_parameters_wait() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(4000, device="meta"))])
    swap_optimizer(optimizer)  # without a warning: they may swap later
    assert set(stays(optimizer).values()) == {StayReason.NOT_MATERIALISED}


def gapped(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg"] = torch.zeros(12, 2)[:, 0].copy_(state["exp_avg"])


def part_of_a_buffer(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg"] = torch.cat([state["exp_avg"], torch.zeros(3)])[:12]


def sharing_a_buffer(state: dict[str, torch.Tensor]) -> None:
    flat = torch.cat([state["exp_avg"], state["exp_avg_sq"]])
    state["exp_avg"], state["exp_avg_sq"] = flat[:12], flat[12:]


def sharing_one_storage(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg_sq"] = state["exp_avg"].abs()
    state["exp_avg"] = state["exp_avg_sq"].view(12)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (gapped, {"1.exp_avg": StayReason.NOT_DENSE}),
        (part_of_a_buffer, {"1.exp_avg": StayReason.SHARES_STORAGE}),
        (sharing_a_buffer, dict.fromkeys(["1.exp_avg", "1.exp_avg_sq"], StayReason.SHARES_STORAGE)),
        (
            sharing_one_storage,
            dict.fromkeys(["1.exp_avg", "1.exp_avg_sq"], StayReason.SHARES_STORAGE),
        ),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_odd_states_stay_and_work(
    twins: Callable[..., Any],
    train: Callable[..., None],
    edit: Callable[[dict[str, torch.Tensor]], None],
    expected: dict[str, StayReason],
    packed: bool,
    when: str,
) -> None:
    def edit_second(optimizer: torch.optim.Optimizer) -> None:
        edit(optimizer.state[optimizer.param_groups[0]["params"][1]])

    config = SwapOptimizerConfig(min_numel=0, swap_times=2, packed_swap=packed)
    if when == "before wrapping":
        pair = twins([(5,), (12,), (6,)], config=config, native_steps=2, prepare=edit_second)
    else:
        pair = twins([(5,), (12,), (6,)], config=config)
        train(pair, 2)
        edit_second(pair.native)
        edit_second(pair.swapped)
    state = pair.swapped.state[pair.swapped.param_groups[0]["params"][1]]
    kept = {name.split(".")[1]: state[name.split(".")[1]] for name in expected}
    train(pair, 3)
    assert {k: v for k, v in stays(pair.swapped).items() if v is not None} == expected
    assert all(state[key] is tensor for key, tensor in kept.items())
