# SPDX-License-Identifier: Apache-2.0
"""State dicts, deepcopy and pickle of a swapped optimizer, and training on from them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import Adam, AdamW, Optimizer

from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig, is_swap_optimizer

SHAPES = [(3, 5), (), (40,), (7, 2)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])


def config(packed: bool) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(min_numel=2, swap_times=3, packed_swap=packed, staging_buffers=3)


@BOTH
@pytest.mark.parametrize("options", [{}, {"fused": True, "amsgrad": True}], ids=["plain", "fused"])
def test_state_dicts_there_and_back(
    twins: Callable[..., Any], train: Callable[..., None], options: dict[str, Any], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed), lr=0.1, **options)
    train(pair, 2, [True, True, False, True])
    fresh = twins(SHAPES, config=config(packed), **options)
    train(fresh, 1)
    for (p, q), (r, s) in zip(pair.pairs(), fresh.pairs(), strict=True):
        r.data.copy_(p)
        s.data.copy_(q)
    # Copies, because natively load_state_dict may share the tensors that it is given.
    fresh.swapped.load_state_dict(copy.deepcopy(pair.native.state_dict()))
    fresh.native.load_state_dict(copy.deepcopy(pair.swapped.state_dict()))
    fresh.check()
    train(fresh, 2)
    assert fresh.swapped.param_groups[0]["lr"] == 0.1
    train(pair, 2)


def through_pickle(obj: Any) -> Any:
    return pickle.loads(pickle.dumps(obj))


@BOTH
@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("optimizer_class", [Adam, AdamW])
def test_copies_train_on(
    twins: Callable[..., Any],
    train: Callable[..., None],
    optimizer_class: type[Optimizer],
    how: Callable[[Any], Any],
    packed: bool,
) -> None:
    pair = twins(
        SHAPES,
        optimizer_class,
        config=config(packed),
        device=CpuAsDevice(poison=True),
        amsgrad=True,
    )
    train(pair, 2, [True, True, True, False])
    native = how(pair.native)
    swapped, params = how((pair.swapped, [q for _, q in pair.pairs()]))
    other = type(pair)(native, swapped, pair.device, pair.steps)
    assert is_swap_optimizer(swapped)
    assert type(swapped) is type(pair.swapped)
    assert all(q is param for (_, q), param in zip(other.pairs(), params, strict=True))
    assert swapped.swap_report().swapped_bytes == pair.swapped.swap_report().swapped_bytes
    assert repr(swapped) == repr(pair.swapped)
    other.check()
    train(other, 3)
    pair.check()  # the original has memory of its own
    train(pair, 2)
    other.check()
