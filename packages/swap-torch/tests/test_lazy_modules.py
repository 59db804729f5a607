# SPDX-License-Identifier: Apache-2.0
"""Parameters of lazy modules: without a shape at wrapping, as natively."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from swap_core import StayReason
from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = [
    (torch.optim.AdamW, {}, {}),
    (torch.optim.AdamW, {"fused": True}, {"zigzag": True}),
    (torch.optim.AdamW, {}, {"device_budget": 0.5}),
    (torch.optim.AdamW, {}, {"prefetch": "backward"}),
    (torch.optim.AdamW, {}, {"overlap_backward": True}),
    (torch.optim.SGD, {"momentum": 0.9}, {}),
    (torch.optim.NAdam, {}, {"device_budget": 0.5}),
    (torch.optim.Rprop, {}, {}),
    (torch.optim.Adafactor, {}, {}),
]


def lazy_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)  # for the values that they get in their first forward pass
    for number in range(5):
        optimizer.zero_grad()
        net(torch.full((2, 5), number + 1.0)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "options", "fields"), CASES)
def test_they_are_updated_as_natively(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], fields: dict[str, Any]
) -> None:
    net, twin = lazy_net(), lazy_net()
    native = kind(twin.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    swapped = swap_optimizer(
        kind(net.parameters(), lr=0.1, **options),  # type: ignore[call-arg]
        SwapOptimizerConfig(min_numel=0, swap_times=2, **fields),
        device=CpuAsDevice(schedule=CopySchedule.LATEST, poison=True),
    )
    train(twin, native)
    train(net, swapped)
    assert_same_bits(native, swapped)


def test_nothing_is_told_of_them_but_that_they_are_to_come() -> None:
    net = nn.LazyLinear(8)
    native = torch.optim.AdamW(net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer: Any = swap_optimizer(
            native, SwapOptimizerConfig(min_numel=0), device=CpuAsDevice()
        )
    stays = {state.stays for state in optimizer.swap_report().states}
    assert stays == {StayReason.NOT_MATERIALISED}
    assert optimizer.host_memory().needed_bytes == 0
    train(net, optimizer)
    assert {state.stays for state in optimizer.swap_report().states} == {None}


def test_a_budget_takes_them_once_they_have_a_shape() -> None:
    net = nn.LazyLinear(8)
    optimizer: Any = swap_optimizer(
        torch.optim.AdamW(net.parameters()),
        SwapOptimizerConfig(min_numel=0, device_budget=1.0),
        device=CpuAsDevice(),
    )
    train(net, optimizer)
    assert {state.stays for state in optimizer.swap_report().states} == {StayReason.BUDGET}
