# SPDX-License-Identifier: Apache-2.0
"""Every option of the real AdamW, natively and swapped, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, nn

from swap_core import StayReason

WAYS = {
    f"{'packed' if packed else 'per tensor'}, masters {'in' if masters else 'out'}": {
        "packed_swap": packed,
        "include_master_params": masters,
    }
    for packed, masters in product((True, False), (True, False))
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
DTYPES = ["FP32", "BF16", "FP16", "MIXED"]


class FallingDecay(nn.Cell):
    """Weight decay that is a Tensor, by the number of the update."""

    def construct(self, step: Tensor) -> Tensor:
        return 0.3 / (step.astype(ms.float32) + 3.0)[0]


def groups(lr: Any = 0.02, decay: Any = 0.0) -> Any:
    def grouped(params: list[Parameter]) -> Sequence[Any]:
        return [
            {"params": params[3:], "lr": lr, "weight_decay": decay},
            {"params": params[:3], "weight_decay": 0.2},
            {"order_params": params},
        ]

    return grouped


def falling(start: float) -> nn.ExponentialDecayLR:
    return nn.ExponentialDecayLR(start, 0.9, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "betas, eps": {"optimizer": {"betas": (0.8, 0.95), "eps": 1e-4}},
    "schedule": {"optimizer": {"learning_rate": falling(0.1)}},
    "list of lr": {"optimizer": {"learning_rate": [0.1, 0.05, 0.01]}},
    "groups": {"groups": groups()},
    "groups, schedules": {
        "groups": groups(falling(0.1)),
        "optimizer": {"learning_rate": falling(0.2)},
    },
    "groups, decay that falls": {"groups": groups(decay=FallingDecay())},
    "amsgrad": {"optimizer": {"amsgrad": True}},
    "maximize": {"optimizer": {"maximize": True}},
}
FUSED = {
    f"fused, {name}": {**case, "optimizer": {**case.get("optimizer", {}), "enable_fused_opt": True}}
    for name, case in OPTIONS.items()
}


@pytest.mark.parametrize("dtypes", DTYPES)
@ways
def test_same_bits_for_every_dtype(kit, release, dtypes, way) -> None:
    pair = kit.make_twins(release, dtypes=getattr(kit, dtypes), **way)
    pair.step(2)
    assert pair.swapped.global_step.asnumpy()[0] == 2


@pytest.mark.parametrize("name", {**OPTIONS, **FUSED})
def test_same_bits_for_every_option(kit, release, name) -> None:
    case = {**OPTIONS, **FUSED}[name]
    for way in (WAYS["packed, masters in"], WAYS["per tensor, masters out"]):
        pair = kit.make_twins(release, dtypes=kit.MIXED, **case, **way)
        pair.step(2)


@pytest.mark.parametrize("fused", [False, True])
@ways
def test_gradients_in_fp32(kit, latest, way, fused) -> None:
    pair = kit.make_twins(
        latest,
        gradient_dtype=ms.float32,
        optimizer={"enable_fused_opt": fused, "amsgrad": fused},
        **way,
    )
    pair.step(2)


@pytest.mark.parametrize(("swap_times", "min_numel"), [(1, 40), (3, 0), (16, 40), (3, 10**6)])
@ways
def test_any_number_of_batches_and_any_threshold(kit, latest, way, swap_times, min_numel) -> None:
    made = {"swap_times": swap_times, "min_numel": min_numel, **way}
    if min_numel == 10**6:
        with pytest.warns(UserWarning, match="fewer elements than min_numel"):
            pair = kit.make_twins(latest, **made)
    else:
        pair = kit.make_twins(latest, **made)
    pair.step(2)
    report = pair.swapped.swap_report()
    moving = {0: 6, 40: 3, 10**6: 0}[min_numel]
    assert report.batches == min(swap_times, moving)
    assert sum(s.stays is None for s in report.states) == moving * (
        2 + way["include_master_params"]
    )


def test_packed_is_the_default_and_masters_stay_by_default(kit, latest) -> None:
    pair = kit.make_twins(latest)
    report = pair.swapped.swap_report()
    assert report.packed
    assert report.stay_counts() == {StayReason.MASTER: 6}
    assert not kit.make_twins(latest, packed_swap=False).swapped.swap_report().packed


@pytest.mark.parametrize("fused", [False, True])
def test_amsgrad_is_what_the_class_makes_of_it(kit, release, fused) -> None:
    """Without the fused kernel the class accepts amsgrad=True and ignores it; so do we."""
    pair = kit.make_twins(release, optimizer={"enable_fused_opt": fused, "amsgrad": True})
    keys = {state.key for state in pair.swapped.swap_report().states}
    assert ("max_exp_avg_sq" in keys) is fused
    pair.step(2)


def test_the_fused_kernel_gets_the_types_and_numbers_that_it_gets_natively(kit, latest) -> None:
    """Its real signature is checked on Ascend only; the stand-in would take others, too."""
    options = {"enable_fused_opt": True, "amsgrad": True, "learning_rate": falling(0.2)}
    grouped = groups(falling(0.1), FallingDecay())
    pair = kit.make_twins(latest, groups=grouped, optimizer=options)
    calls = []
    for optimizer in (pair.native, pair.swapped):
        kernel, seen = optimizer.fused_adamw_opt, []

        def noted(*given: Any, kernel: Any = kernel, seen: list[Any] = seen) -> None:
            tensors, numbers = given[:6], given[6:]
            seen.append(([(str(t.dtype), t.shape) for t in tensors], [*map(repr, numbers)]))
            kernel(*given)

        optimizer.fused_adamw_opt = noted
        calls.append(seen)
    pair.step(1)
    native, swapped = calls
    assert swapped == native
    assert len(swapped) == 6


def test_the_fused_kernel_without_amsgrad_has_no_third_moment(kit, latest) -> None:
    """Natively its place is taken by the second, which would then be two states and stay."""
    pair = kit.make_twins(latest, optimizer={"enable_fused_opt": True})
    states = pair.swapped.swap_report().states
    assert {s.key for s in states} == {"exp_avg", "exp_avg_sq", "master_param"}
    assert sum(s.stays is None for s in states) == 2 * 6
    pair.step(1)


@pytest.mark.parametrize("keys", [("exp_avg",), ("exp_avg_sq", "master_param")])
@pytest.mark.parametrize("packed", [True, False])
def test_some_of_the_states(kit, latest, keys, packed) -> None:
    masters = "master_param" in keys
    pair = kit.make_twins(
        latest, state_keys=keys, include_master_params=masters, packed_swap=packed
    )
    pair.step(2)
    swapping = {s.key for s in pair.swapped.swap_report().states if s.stays is None}
    assert swapping == set(keys)


def test_parameters_that_are_fp32_have_no_master_and_swap_their_moments(kit, latest) -> None:
    pair = kit.make_twins(latest, dtypes=kit.MIXED, include_master_params=True)
    pair.step(1)
    states = pair.swapped.swap_report().states
    by_owner = {}
    for state in states:
        assert state.stays is None
        by_owner.setdefault(state.owner, []).append(state.key)
    moments = ["exp_avg", "exp_avg_sq"]
    assert list(by_owner.values()) == [
        moments if i % 3 == 1 else [*moments, "master_param"] for i in range(6)
    ]
    pair = kit.make_twins(latest, dtypes=kit.FP32, include_master_params=True)  # none at all
    assert {state.key for state in pair.swapped.swap_report().states} == set(moments)


def test_wrapping_after_native_steps(kit, latest) -> None:
    from swap_mindformers import SwapOptimizerConfig, swap_optimizer
    from swap_mindspore import HostDevice

    pair = kit.make_twins(latest, include_master_params=True)
    pair.step(2)
    config = SwapOptimizerConfig(min_numel=0, include_master_params=True)
    assert swap_optimizer(pair.native, config, device=HostDevice(poison=True)) is pair.native
    pair.step(2)
