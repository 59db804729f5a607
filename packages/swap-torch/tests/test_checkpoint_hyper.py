# SPDX-License-Identifier: Apache-2.0
"""State dicts of HyperParallel's AdamW, by a stand-in with its interface."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from swap_core import StateDictError
from swap_testkit.torch.hyper_standin import HYPER_MODULE as NAME
from swap_testkit.torch.hyper_standin import AdamW, adamw
from swap_torch import SwapOptimizerConfig

SHAPES = [(3, 50), (), (40,), (7, 2)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in under the real name."""
    found = ModuleType(NAME)
    found.AdamW, found.adamw = AdamW, adamw
    monkeypatch.setitem(sys.modules, NAME, found)
    monkeypatch.setattr(AdamW, "__module__", NAME)
    return found


def config(packed: bool) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(min_numel=8, swap_times=3, packed_swap=packed)


@BOTH
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("trained", [0, 2])
def test_files_both_ways_with_the_counter_of_the_group(
    twins: Callable[..., Any],
    train: Callable[..., None],
    trained: int,
    amsgrad: bool,
    packed: bool,
) -> None:
    pair = twins(SHAPES, AdamW, config=config(packed), amsgrad=amsgrad)
    train(pair, 3, [True, True, False, True])
    files = []
    for optimizer in (pair.native, pair.swapped):
        files.append(io.BytesIO())
        torch.save(optimizer.state_dict(), files[-1])
        files[-1].seek(0)
    native, swapped = (torch.load(file, weights_only=True) for file in files)
    assert swapped["param_groups"] == native["param_groups"]
    assert swapped["param_groups"][0]["step"] == 3
    to = twins(SHAPES, AdamW, config=config(packed))
    train(to, trained)
    for (p, q), (r, s) in zip(pair.pairs(), to.pairs(), strict=True):
        r.data.copy_(p)
        s.data.copy_(q)
    to.native.load_state_dict(swapped)
    to.swapped.load_state_dict(native)
    to.check()
    train(to, 2)
    assert to.swapped.param_groups[0]["step"] == 5


@BOTH
def test_later_steps_do_not_change_it(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, AdamW, config=config(packed))
    train(pair, 2)
    state_dict, expected = pair.swapped.state_dict(), copy.deepcopy(pair.native.state_dict())
    train(pair, 2)
    assert state_dict["param_groups"] == expected["param_groups"]
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            assert torch.equal(state_dict["state"][index][key], value)


def test_what_does_not_fit_is_refused(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins(SHAPES, AdamW, config=config(packed=True))
    train(pair, 1)
    state_dict = pair.swapped.state_dict()
    del state_dict["state"][2]["exp_avg_sq"]
    with pytest.raises(StateDictError, match=r"group 0, parameter 2 lacks 'exp_avg_sq'"):
        pair.swapped.load_state_dict(state_dict)
    train(pair, 1)
