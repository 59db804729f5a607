# SPDX-License-Identifier: Apache-2.0
"""Every combination of options, against the native optimizer, bit for bit.

The options that a parameter group can have are all in one optimizer, a group for each
combination, so batches also cut across groups that differ in everything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW

from swap_testkit.torch import CopySchedule, CpuAsDevice
from swap_torch import SwapOptimizerConfig

SHAPES = [(3, 5), (7,)]
"""The second one is below MIN_NUMEL: its states stay."""
MIN_NUMEL = 8
DTYPES = {
    "fp32": [torch.float32],
    "bf16": [torch.bfloat16],
    "fp16": [torch.float16],
    "fp64": [torch.float64],
    "complex64": [torch.complex64],
    "mixed": [torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.float16],
    "mixed-real": [torch.float32, torch.bfloat16, torch.float16],
}
KERNELS = {
    "Adam-for-loop": (Adam, {"foreach": False}),
    "Adam-foreach": (Adam, {}),
    "AdamW-for-loop": (AdamW, {"fused": False}),
    "AdamW-foreach": (AdamW, {}),
    "AdamW-fused": (AdamW, {"fused": True}),
}
COUNTED = {"foreach": "_foreach_lerp_", "fused": "_fused_adamw_"}
"""What of torch each implementation calls once per group (foreach: per dtype too) and batch."""


def groups(optimizer_class: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """One group for each combination; no two have the same lr or betas."""
    decays = [(0.0, True), (0.1, True)]
    if optimizer_class is Adam:
        decays += [(0.1, False)]
    product = itertools.product((False, True), (False, True), decays, (False, True))
    for number, (amsgrad, maximize, (weight_decay, decoupled), tensor_lr) in enumerate(product):
        lr = 1e-3 * (number + 1)
        yield {
            "params": SHAPES,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled,
            "lr": torch.tensor(lr) if tensor_lr else lr,
            "betas": (0.6 + 0.01 * number, 0.95 + 0.001 * number),
            "eps": 1e-3,
        }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of each implementation's own function."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        native = getattr(torch, COUNTED[name])

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return native(*args, **kwargs)

        return call

    for name, function in COUNTED.items():
        monkeypatch.setattr(torch, function, counted(name))
    return counts


def combinations() -> Iterator[Any]:
    for kernel, dtype in itertools.product(KERNELS, DTYPES):
        if dtype == ("mixed" if kernel == "AdamW-fused" else "mixed-real"):
            continue
        for packed, swap_times in itertools.product((True, False), (1, 3, "all", "10 x all")):
            if dtype == "complex64" and (kernel == "AdamW-fused" or swap_times != 3):
                continue  # no such kernel; and complex states do not swap
            if swap_times == "10 x all" and dtype in ("bf16", "fp16", "fp64"):
                continue  # the same batches as "all"
            how = "packed" if packed else "per-tensor"
            name = f"{kernel}-{dtype}-{how}-{swap_times}".replace(" ", "")
            yield pytest.param(kernel, DTYPES[dtype], packed, swap_times, id=name)


@pytest.mark.parametrize(("kernel", "dtypes", "packed", "swap_times"), list(combinations()))
def test_same_bits(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    calls: Counter[str],
    kernel: str,
    dtypes: list[torch.dtype],
    packed: bool,
    swap_times: int | str,
) -> None:
    optimizer_class, options = KERNELS[kernel]
    all_groups = list(groups(optimizer_class))
    count = len(all_groups) * len(SHAPES)
    times = {"all": count, "10 x all": 10 * count}.get(swap_times, swap_times)
    schedule = CopySchedule.RANDOM if swap_times == "all" else CopySchedule.LATEST
    nothing_swaps = not any(dtype.is_floating_point for dtype in dtypes)
    with pytest.warns(UserWarning, match="none of") if nothing_swaps else nullcontext():
        pair = twins(
            all_groups,
            optimizer_class,
            dtype=dtypes,
            config=SwapOptimizerConfig(swap_times=times, min_numel=MIN_NUMEL, packed_swap=packed),
            device=CpuAsDevice(schedule=schedule, seed=count, poison=True),
            **options,
        )
    train(pair, 3)
    assert all(p.isfinite().all() for p, _ in pair.pairs())
    report = pair.swapped.swap_report()
    swapping = {state.owner for state in report.states if state.stays is None}
    assert report.batches == min(times, len(swapping))
    expected = [p for p, _ in pair.pairs() if not p.is_complex() and p.numel() >= MIN_NUMEL]
    assert len(swapping) == len(expected)
    _, _, implementation = kernel.partition("-")
    assert set(calls) == ({implementation} if implementation in COUNTED else set())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_side_runs_the_same_implementation(
    twins: Callable[..., Any],
    train: Callable[..., None],
    foreach_on_cpu: None,
    calls: Counter[str],
    kernel: str,
    packed: bool,
) -> None:
    optimizer_class, options = KERNELS[kernel]
    config = SwapOptimizerConfig(min_numel=0, swap_times=3, packed_swap=packed)
    pair = twins([(4,), (5,), (6,)], optimizer_class, config=config, **options)
    train(pair, 1)  # whether direct kernels agree is tried out in the first step
    calls.clear()
    pair.give_gradients()
    pair.native.step()
    native = Counter(calls)
    pair.swapped.step()
    pair.check()
    assert sum(native.values()) == (0 if kernel.endswith("for-loop") else 1)
    assert calls - native == Counter(dict.fromkeys(native, 3))  # once for each batch


def test_odd_parameter_type_decides_for_the_whole_group(
    twins: Callable[..., Any], foreach_on_cpu: None, calls: Counter[str]
) -> None:
    class Odd(torch.nn.Parameter):
        """foreach=None means a for-loop if one parameter is of a type that torch does not know."""

    def params() -> list[torch.Tensor]:
        kinds = (torch.nn.Parameter, torch.nn.Parameter, Odd)
        return [kind(torch.linspace(-1, 1, 8)) for kind in kinds]

    pair = twins(params)
    for mask in ([True, True, True], [True, True, False]):
        pair.give_gradients(mask)
        pair.native.step()
        native = Counter(calls)
        pair.swapped.step()
        pair.check()
        assert bool(native) is not mask[2]
        assert bool(calls - native) is not mask[2]
        calls.clear()


def test_counters_have_the_default_dtype(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        pair = twins([(4,), (5,)])
        train(pair, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    steps = [state["step"].dtype for state in pair.swapped.state.values()]
    assert steps == [torch.float64, torch.float64]


@pytest.mark.parametrize("shapes", [[(4,), (5,)], [(4,)]], ids=["float-and-complex", "complex"])
def test_fused_refuses_complex_before_anything_changed(
    twins: Callable[..., Any], shapes: list[Any]
) -> None:
    dtypes = [torch.float32, torch.complex64] if len(shapes) == 2 else torch.complex64
    with pytest.warns(UserWarning, match="none of") if len(shapes) == 1 else nullcontext():
        pair = twins(shapes, AdamW, dtype=dtypes, fused=True)
    pair.give_gradients()
    before = [q.detach().clone() for _, q in pair.pairs()]
    with pytest.raises(RuntimeError, match="requires all the params to be floating point"):
        pair.native.step()
    with pytest.raises(RuntimeError, match="requires all the params to be floating point"):
        pair.swapped.step()
    assert all(torch.equal(q, old) for (_, q), old in zip(pair.pairs(), before, strict=True))
    assert pair.device.held_bytes == 0
    assert all(int(state["step"]) == 0 for state in pair.swapped.state.values() if state)
