# SPDX-License-Identifier: Apache-2.0
"""Every option of both optimizers, natively and swapped, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, nn


class FadingDecay(nn.Cell):
    """A weight decay that depends on the step."""

    def construct(self, global_step: Tensor) -> Tensor:
        return Tensor(0.01, ms.float32) / (1.0 + global_step.astype(ms.float32)).reshape(())


def groups(params: list[Parameter], lr: Any) -> list[dict[str, Any]]:
    return [
        {"params": params[3:], "lr": lr, "weight_decay": 0.0},
        {"params": params[:3], "weight_decay": 0.01},
        {"order_params": params},
    ]


def falling(start: float) -> nn.ExponentialDecayLR:
    return nn.ExponentialDecayLR(start, 0.9, 2)


ADAM: dict[str, Callable[[list[Parameter]], nn.Optimizer]] = {
    "default": lambda ps: nn.Adam(ps),
    "nesterov": lambda ps: nn.Adam(ps, 0.01, use_nesterov=True),
    "amsgrad": lambda ps: nn.Adam(ps, 0.01, use_amsgrad=True),
    "weight decay": lambda ps: nn.Adam(ps, 0.01, weight_decay=0.1),
    "loss scale": lambda ps: nn.Adam(ps, 0.01, loss_scale=1024.0, weight_decay=0.1),
    "betas, eps, locking": lambda ps: nn.Adam(ps, 0.01, 0.8, 0.95, 1e-4, use_locking=True),
    "schedule": lambda ps: nn.Adam(ps, falling(0.1)),
    "list of lr": lambda ps: nn.Adam(ps, [0.1, 0.05, 0.01, 0.005]),
    "tensor lr": lambda ps: nn.Adam(ps, Tensor(0.01, ms.float32)),
    "groups": lambda ps: nn.Adam(groups(ps, 0.02), 0.01, weight_decay=0.05),
    "groups, amsgrad": lambda ps: nn.Adam(groups(ps, 0.02), 0.01, use_amsgrad=True),
    "groups, schedules": lambda ps: nn.Adam(groups(ps, falling(0.1)), falling(0.2)),
    "groups, one lr": lambda ps: nn.Adam(
        [{"params": ps[:3], "weight_decay": 0.01}, {"params": ps[3:]}], 0.01
    ),
    "dynamic weight decay": lambda ps: nn.Adam(ps, 0.01, weight_decay=FadingDecay()),
}


def unfused(optimizer: nn.Optimizer) -> nn.Optimizer:
    optimizer.use_fused_opt = False
    return optimizer


ADAM_WEIGHT_DECAY: dict[str, Callable[[list[Parameter]], nn.Optimizer]] = {
    "default": lambda ps: nn.AdamWeightDecay(ps),
    "weight decay": lambda ps: nn.AdamWeightDecay(ps, 0.01, weight_decay=0.1),
    "schedule": lambda ps: nn.AdamWeightDecay(ps, falling(0.1), weight_decay=0.1),
    "groups": lambda ps: nn.AdamWeightDecay(groups(ps, 0.02), 0.01, weight_decay=0.05),
    "groups, schedules": lambda ps: nn.AdamWeightDecay(groups(ps, falling(0.1)), falling(0.2)),
    "groups, one lr": lambda ps: nn.AdamWeightDecay(
        [{"params": ps[:3], "weight_decay": 0.01}, {"params": ps[3:]}], 0.01
    ),
    "dynamic weight decay": lambda ps: nn.AdamWeightDecay(ps, 0.01, weight_decay=FadingDecay()),
    "not fused": lambda ps: unfused(nn.AdamWeightDecay(ps, 0.01, weight_decay=0.1)),
}

CASES = {
    **{f"Adam, {name}": make for name, make in ADAM.items()},
    **{f"AdamWeightDecay, {name}": make for name, make in ADAM_WEIGHT_DECAY.items()},
}
# The CPU build has no AMSGrad kernel for half precision.
HALVES = [
    "Adam, default",
    "Adam, nesterov",
    "Adam, loss scale",
    "Adam, groups",
    "AdamWeightDecay, groups",
    "AdamWeightDecay, weight decay",
    "AdamWeightDecay, not fused",
]


@pytest.mark.parametrize("name", CASES)
def test_same_bits(kit, name) -> None:
    pair = kit.make_twins(CASES[name])
    pair.step(3)
    assert pair.swapped.global_step.asnumpy()[0] == 3


@pytest.mark.parametrize("name", HALVES)
def test_same_bits_in_half_precision(kit, name) -> None:
    pair = kit.make_twins(CASES[name], dtype=ms.float16)
    assert pair.swapped.swap_report().states[0].dtype == "float16"
    pair.step(2)


@pytest.mark.parametrize("swap_times", [1, 2, 6, 16])
@pytest.mark.parametrize("make", [nn.Adam, nn.AdamWeightDecay])
def test_same_bits_for_any_number_of_batches(kit, make, swap_times) -> None:
    pair = kit.make_twins(make, swap_times=swap_times)
    pair.step(2)
    assert pair.swapped.swap_report().batches == min(swap_times, 6)


@pytest.mark.parametrize(("min_numel", "swapping"), [(0, 12), (30, 8), (10**6, 0)])
def test_small_states_stay(kit, min_numel, swapping) -> None:
    if swapping == 0:
        with pytest.warns(UserWarning, match="fewer elements than min_numel"):
            pair = kit.make_twins(nn.Adam, min_numel=min_numel)
    else:
        pair = kit.make_twins(nn.Adam, min_numel=min_numel)
    pair.step(2)
    states = pair.swapped.swap_report().states
    assert sum(state.stays is None for state in states) == swapping


@pytest.mark.parametrize("keys", [("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq")])
def test_some_of_the_states(kit, keys) -> None:
    pair = kit.make_twins(lambda ps: nn.Adam(ps, 0.01, use_amsgrad=True), state_keys=keys)
    pair.step(2)
    swapping = {s.key for s in pair.swapped.swap_report().states if s.stays is None}
    assert swapping == set(keys)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32])
def test_gradients_of_another_dtype_as_native_takes_them(kit, dtype) -> None:
    for make in [nn.Adam, nn.AdamWeightDecay] if dtype == ms.float32 else [nn.AdamWeightDecay]:
        pair = kit.make_twins(make, dtype=dtype)
        other = ms.float16 if dtype == ms.float32 else ms.float32
        for optimizer in (pair.native, pair.swapped):
            optimizer(tuple(p.astype(other) for p in optimizer.parameters))
        pair.check()


def test_wrapping_after_native_steps(kit) -> None:
    from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer

    pair = kit.make_twins(nn.Adam)
    pair.step(1)
    native = pair.native
    swapped = swap_optimizer(
        native, SwapOptimizerConfig(min_numel=0), device=HostDevice(poison=True)
    )
    assert swapped is native
    pair.step(2)
