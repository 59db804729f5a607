# SPDX-License-Identifier: Apache-2.0
"""Parameters of every shape and layout, and parameters that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swap_testkit.torch import CopySchedule, CpuAsDevice
from swap_torch import SwapOptimizerConfig

WAYS = [
    pytest.param(True, 1, id="packed-1"),
    pytest.param(True, 3, id="packed-3"),
    pytest.param(False, 2, id="per-tensor-2"),
    pytest.param(False, 100, id="per-tensor-100"),
]
KINDS: list[dict[str, Any]] = [{}, {"fused": True}, {"amsgrad": True, "maximize": True}]


def values(*shape: int) -> torch.Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape)


def empty() -> list[nn.Parameter]:
    return [nn.Parameter(values(*shape)) for shape in [(0,), (3, 0, 2), (4,), (0,), (5,)]]


def zero_dim_and_one_element() -> list[nn.Parameter]:
    return [nn.Parameter(values(*shape)) for shape in [(), (1,), (1, 1, 1), (), (2,)]]


def transposed() -> list[nn.Parameter]:
    permuted = [values(4, 6).t(), values(2, 3, 4).permute(1, 2, 0), values(3, 1, 5).transpose(0, 2)]
    return [nn.Parameter(value) for value in permuted]


def channels_last() -> list[nn.Parameter]:
    flat = values(2, 3, 4, 5).to(memory_format=torch.channels_last)
    deep = values(2, 3, 2, 3, 2).to(memory_format=torch.channels_last_3d)
    # With one channel both memory formats fit; the strides of states must still be native's.
    thin = values(4, 1, 3, 3).to(memory_format=torch.channels_last)
    return [nn.Parameter(flat), nn.Parameter(deep), nn.Parameter(thin)]


def one_larger_than_all_others() -> list[nn.Parameter]:
    return [nn.Parameter(values(*shape)) for shape in [(3,), (7,), (2000,), (5,), (1, 9)]]


def strided_with_gaps() -> list[nn.Parameter]:
    return [nn.Parameter(values(8, 6)[::2, ::3]), nn.Parameter(values(9)[1:8:2])]


def expanded() -> list[nn.Parameter]:
    return [
        nn.Parameter(values(1, 4).expand(1, 4)),
        nn.Parameter(values(4).as_strided((1, 4), (9, 1))),
    ]


def views_of_a_flat_buffer() -> list[nn.Parameter]:
    flat = values(60)
    parts = [flat[:20].view(4, 5), flat[20:21], flat[21:60].view(3, 13).t()]
    return [nn.Parameter(part) for part in parts]


def frozen() -> list[nn.Parameter]:
    wanted = [True, False, True, False]
    return [nn.Parameter(values(4, 3), requires_grad=w) for w in wanted]


def in_half(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """In bfloat16, so that sizes in bytes are odd multiples of two."""
    return [nn.Parameter(p.detach().bfloat16(), requires_grad=p.requires_grad) for p in params]


LAYOUTS = [
    empty,
    zero_dim_and_one_element,
    transposed,
    channels_last,
    one_larger_than_all_others,
    strided_with_gaps,
    expanded,
    views_of_a_flat_buffer,
    frozen,
]


@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
@pytest.mark.parametrize("make", LAYOUTS)
def test_layouts(
    twins: Callable[..., Any],
    train: Callable[..., None],
    make: Callable[[], list[nn.Parameter]],
    packed: bool,
    swap_times: int,
) -> None:
    config = SwapOptimizerConfig(min_numel=0, swap_times=swap_times, packed_swap=packed)
    for options in KINDS:
        train(twins(make, config=config, **options), 3)
        train(twins(lambda: in_half(make()), config=config, **options), 3)


@pytest.mark.parametrize("free", [False, True], ids=["poisoned", "really-freed"])
@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
def test_state_memory_is_that_of_the_layout(
    twins: Callable[..., Any],
    train: Callable[..., None],
    packed: bool,
    swap_times: int,
    free: bool,
) -> None:
    """Everything at once, with memory that is freed between batches."""
    device = CpuAsDevice(schedule=CopySchedule.RANDOM, seed=swap_times, poison=not free)
    config = SwapOptimizerConfig(min_numel=0, swap_times=swap_times, packed_swap=packed)
    pair = twins(lambda: [p for make in LAYOUTS for p in make()], config=config, device=device)
    train(pair, 3)
    swapping = [p for p, _ in pair.pairs() if p.grad is not None and p.numel() > 0]
    report = pair.swapped.swap_report()
    assert report.swapped_bytes == sum(2 * p.numel() * p.element_size() for p in swapping)
    assert report.batches == min(swap_times, len(swapping))
    for p, q in pair.pairs():
        for key in ("exp_avg", "exp_avg_sq") if p.grad is not None and p.numel() > 0 else ():
            shown = pair.swapped.state[q][key]
            assert shown.stride() == torch.zeros_like(p).stride()
            assert shown.untyped_storage().nbytes() == shown.numel() * shown.element_size()


@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
@pytest.mark.parametrize("min_numel", [0, 1, 11, 12, 13, 1000])
def test_exactly_at_and_just_below_min_numel(
    twins: Callable[..., Any],
    train: Callable[..., None],
    packed: bool,
    swap_times: int,
    min_numel: int,
) -> None:
    shapes = [(), (1,), (11,), (12,), (3, 4), (13,), (0,)]
    config = SwapOptimizerConfig(min_numel=min_numel, swap_times=swap_times, packed_swap=packed)
    if min_numel == 1000:
        with pytest.warns(UserWarning, match="fewer elements than min_numel"):
            pair = twins(shapes, config=config)
    else:
        pair = twins(shapes, config=config)
    train(pair, 2)
    swaps = [s.stays is None for s in pair.swapped.swap_report().states if s.key == "exp_avg"]
    assert swaps == [torch.Size(shape).numel() >= max(1, min_numel) for shape in shapes]


@pytest.mark.parametrize("options", KINDS, ids=["for-loop", "fused", "amsgrad"])
@pytest.mark.parametrize("min_numel", [0, 5], ids=["all-swap", "some-stay"])
@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
def test_parameter_listed_twice_is_updated_twice(
    twins: Callable[..., Any],
    train: Callable[..., None],
    packed: bool,
    swap_times: int,
    min_numel: int,
    options: dict[str, Any],
) -> None:
    def params() -> list[dict[str, Any]]:
        a, b, c, d = (nn.Parameter(values(n)) for n in (7, 4, 6, 3))
        # The duplicates' positions overlap, and one parameter is listed three times.
        return [{"params": [a, b, c, a, d, b, a]}, {"params": [nn.Parameter(values(5))]}]

    config = SwapOptimizerConfig(min_numel=min_numel, swap_times=swap_times, packed_swap=packed)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        pair = twins(params, config=config, **options)
    train(pair, 3)
    train(pair, 2, [True, False, True, True, True, False, True, False])
    first = pair.swapped.param_groups[0]["params"]
    assert [int(pair.swapped.state[p]["step"]) for p in first[:3]] == [15, 6, 5]


@pytest.mark.parametrize("min_numel", [0, 6, 13], ids=["all-swap", "small-stay", "only-one-swaps"])
@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
def test_parameters_that_share_memory(
    twins: Callable[..., Any],
    train: Callable[..., None],
    packed: bool,
    swap_times: int,
    min_numel: int,
) -> None:
    """Tied by data and overlapping views: the order of updates decides the bits."""

    def params() -> list[nn.Parameter]:
        flat = values(20)
        ties = [flat[:14], flat[4:9], flat[:14].view(7, 2).t(), flat[8:11], flat[2:20]]
        return [nn.Parameter(tie) for tie in ties]

    config = SwapOptimizerConfig(min_numel=min_numel, swap_times=swap_times, packed_swap=packed)
    for options in ({"weight_decay": 0.3, "lr": 0.1}, {"weight_decay": 0.3, "fused": True}):
        train(twins(params, config=config, **options), 3)


def test_tied_module_weights_are_one_parameter(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    def params() -> list[nn.Parameter]:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(11, 4), nn.Linear(4, 11)
        head.weight = embedding.weight
        return list(nn.Sequential(embedding, head).parameters())

    pair = twins(params)
    train(pair, 3)
    assert len(pair.swapped.state) == 2


@pytest.mark.parametrize(("packed", "swap_times"), WAYS)
@pytest.mark.parametrize("options", KINDS, ids=["for-loop", "fused", "amsgrad"])
def test_gradients_with_other_strides(
    twins: Callable[..., Any], packed: bool, swap_times: int, options: dict[str, Any]
) -> None:
    config = SwapOptimizerConfig(min_numel=0, swap_times=swap_times, packed_swap=packed)
    pair = twins([values(4, 6), values(6, 4).t(), values(3, 5)], config=config, **options)
    for step in range(3):
        pair.give_gradients()
        for number, (p, q) in enumerate(pair.pairs()):
            if number == 2 and "fused" not in options:  # torch's fused kernel ignores strides
                p.grad = q.grad = torch.full((1, 1), step + 0.5).expand(3, 5)
            else:
                p.grad, q.grad = (g.t().contiguous().t() for g in (p.grad, q.grad))
                p.grad = p.grad if step else p.grad.contiguous()
                q.grad = q.grad if step else q.grad.contiguous()
        pair.native.step()
        pair.swapped.step()
        pair.check()
