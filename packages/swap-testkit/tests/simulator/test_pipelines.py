# SPDX-License-Identifier: Apache-2.0
"""swap-torch on a device: every pipeline in every schedule, with the checker on."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from swap_core import align, format_bytes
from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import NPU_QUIRKS, Link, Quirks, Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer
from swap_torch.device import accelerator_device

DEVICE = "simnpu"
KINDS = [
    "adam, for-loop",
    "adam, foreach",
    "adam, amsgrad",
    "adamw, for-loop",
    "adamw, foreach",
    "adamw, fused",
    "adamw, fused, amsgrad",
]
PACKED = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


def test_loads_stores_and_updates_have_streams_of_their_own() -> None:
    device = accelerator_device(torch.device(DEVICE, 0))
    streams = device.load_stream, device.store_stream, device.update_stream, device.compute_stream()
    assert len({stream.stream_id for stream in streams}) == 4


@PACKED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read_at_each", [True, False], ids=["read", "unread"])
def test_bits_equal_and_no_races(
    pipelines: ModuleType, schedule: Schedule, kind: str, packed: bool, read_at_each: bool
) -> None:
    pipelines.Twins(kind, packed=packed).run(read_at_each=read_at_each)
    assert simulator.races() == []


@PACKED
def test_with_the_quirks_of_an_npu(pipelines: ModuleType, schedule: Schedule, packed: bool) -> None:
    simulator.set_quirks(NPU_QUIRKS)
    pipelines.Twins("adamw, fused", packed=packed, swap_times=3).run()
    assert simulator.races() == []


@PACKED
def test_over_a_slow_link(pipelines: ModuleType, packed: bool) -> None:
    simulator.set_schedule(Schedule.THREADS, link=Link(latency=2e-3))
    pipelines.Twins(packed=packed).run()
    assert simulator.races() == []


@PACKED
def test_on_a_stream_of_the_callers(
    pipelines: ModuleType, schedule: Schedule, packed: bool
) -> None:
    stream = torch.Stream(device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        twins = pipelines.Twins(packed=packed)
        twins.run()
    assert simulator.races() == []


@PACKED
def test_a_thousand_random_orders(pipelines: ModuleType, packed: bool) -> None:
    # The checker judges what is queued, which is the same each time. So a few optimizers, whose
    # many updates are each run in another order.
    twins = pipelines.Twins(packed=packed, swap_times=4)
    with simulator.strict_free():
        for seed in range(500):
            simulator.set_schedule(Schedule.RANDOM, seed=seed)
            twins.step()
            if seed % 10 == 9:
                twins.check()
    assert simulator.races() == []


# Memory, to the byte.


def state_bytes(pipelines: ModuleType) -> list[int]:
    """Of each parameter: two states."""
    return [
        2 * torch.empty(shape, dtype=dtype, device="meta").nbytes
        for shape, dtype in pipelines.PARAMETERS
    ]


@PACKED
def test_idle_and_peak_are_the_formula(pipelines: ModuleType, packed: bool) -> None:
    # The only memory in an update beside the optimizer's is what the kernel takes for itself, so
    # a kernel that takes none.
    twins = pipelines.Twins("adamw, fused", packed=packed)
    twins.step()
    twins.check()
    twins.give_gradients()
    torch.accelerator.synchronize()
    idle = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    twins.swapped.step()
    peak = torch.accelerator.max_memory_allocated() - idle
    assert torch.accelerator.memory_allocated() == idle
    values = [nbytes // 2 for nbytes in state_bytes(pipelines)]
    if packed:
        spans = [2 * align(nbytes) for nbytes in values]
        expected = max(spans[0::2]) + max(spans[1::2])
    else:
        blocks = [2 * align(nbytes) for nbytes in values]
        expected = max(map(sum, pairwise(blocks)))
    assert peak == expected
    twins.native.step()


def test_states_take_nothing_between_updates(pipelines: ModuleType) -> None:
    def held(make: Any) -> int:
        before = torch.accelerator.memory_allocated()
        optimizer = make()
        for p in pipelines.parameters(optimizer):
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p in pipelines.parameters(optimizer):
            p.grad = None
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated() - before

    config = SwapOptimizerConfig(min_numel=1)
    native = held(lambda: pipelines._optimizer("adamw, for-loop"))
    swapped = held(lambda: swap_optimizer(pipelines._optimizer("adamw, for-loop"), config))
    states = sum(2 * align(nbytes // 2) for nbytes in state_bytes(pipelines))
    assert native - swapped == states


@pytest.mark.parametrize("quirks", [Quirks(), NPU_QUIRKS], ids=["exact", "npu"])
def test_pinned_memory_is_what_the_states_need(quirks: Quirks) -> None:
    simulator.set_quirks(quirks)
    sizes = [16_000, 1_204, 36_000, 2_048] * 60
    params = [torch.nn.Parameter(torch.zeros(size, device=DEVICE)) for size in sizes]
    before = simulator.pinned_bytes()
    optimizer = swap_optimizer(torch.optim.AdamW(params, fused=True))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    taken = simulator.pinned_bytes() - before
    assert taken <= 1.02 * 8 * sum(sizes), format_bytes(taken)
    assert optimizer.swap_report().host_bytes >= taken  # type: ignore[attr-defined]
    steady = simulator.pinned_bytes()
    for _ in range(2):
        optimizer.step()
    assert simulator.pinned_bytes() == steady
    del optimizer
    assert simulator.pinned_bytes() == before


def losses(swap: bool, steps: int = 4) -> list[float]:
    """Train a small model; the gradients' and activations' memory is small beside the states'."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).to(DEVICE)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if swap:
        swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=8, min_numel=64))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        batch = torch.randn(4, 64, generator=generator).to(DEVICE)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_training_beyond_the_limit_of_the_native_optimizer(schedule: Schedule) -> None:
    expected = losses(swap=False)
    torch.accelerator.empty_cache()
    # Parameters and gradients take 266 KiB, native states as much again.
    simulator.set_memory_limit(420 * 1024)
    with pytest.raises(torch.OutOfMemoryError):
        losses(swap=False)
    assert losses(swap=True) == expected
    assert simulator.races() == []


@PACKED
def test_out_of_memory_in_an_update_loses_nothing(
    pipelines: ModuleType, schedule: Schedule, packed: bool
) -> None:
    twins = pipelines.Twins("adamw, fused", packed=packed)
    twins.step()
    twins.check()
    twins.give_gradients()
    simulator.set_memory_limit(torch.accelerator.memory_allocated() + 512)
    with pytest.raises(torch.OutOfMemoryError, match=r"Nothing is lost.*Raise swap_times"):
        twins.swapped.step()
    simulator.set_memory_limit(None)
    if packed:
        twins.swapped.step()
        twins.native.step()
        twins.check()
    assert simulator.races() == []


def test_where_nothing_can_be_pinned_pageable_memory_does(
    pipelines: ModuleType, schedule: Schedule, request: pytest.FixtureRequest
) -> None:
    # A device warns once; this one has not yet, and no other test gets it.
    accelerator_device.cache_clear()
    request.addfinalizer(accelerator_device.cache_clear)
    simulator.set_pinned_limit(0)
    twins = pipelines.Twins()
    with pytest.warns(RuntimeWarning, match="Pinning .* failed"):
        twins.step()
    twins.run()
    assert simulator.races() == []
