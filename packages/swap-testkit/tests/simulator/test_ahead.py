# SPDX-License-Identifier: Apache-2.0
"""Loads and updates in the backward pass, kept batches and tails, on streams that are checked.

The gradients come from real backward passes, which run on a thread of their own.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from torch import nn

from swap_core import StepTimes
from swap_testkit.torch import assert_same_bits, simulator
from swap_testkit.torch.simulator import Schedule
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch": {"prefetch": "backward"},
    "prefetch per tensor": {"prefetch": "backward", "packed_swap": False},
    "zigzag": {"zigzag": True},
    "zigzag and prefetch": {"zigzag": True, "prefetch": "backward"},
    "overlap": {"overlap_backward": True},
    "overlap per tensor": {"overlap_backward": True, "packed_swap": False},
    "budget": {"device_budget": 0.4, "prefetch": "backward"},
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(4, 16, generator=generator).to(DEVICE)
    net(x).square().sum().backward()
    optimizer.step()


def both(way: str, **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    nets = [network(), network()]
    native, other = (torch.optim.AdamW(net.parameters(), lr=0.1, **options) for net in nets)
    config = SwapOptimizerConfig(min_numel=1, swap_times=5, **WAYS[way])
    swapped: Any = swap_optimizer(other, config)
    with simulator.strict_free():
        for number in range(5):
            train(nets[0], native, number)
            train(nets[1], swapped, number)
    return nets[1], swapped, native


@EACH_WAY
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=["fused", "loop"])
def test_bits_are_those_of_native_and_every_access_is_ordered(
    way: str, options: dict[str, Any], schedule: Schedule
) -> None:
    _, swapped, native = both(way, **options)
    assert_same_bits(native, swapped)


@pytest.mark.parametrize("way", ["overlap", "overlap per tensor"])
def test_updates_in_the_backward_pass_have_a_stream_of_their_own(
    way: str, schedule: Schedule
) -> None:
    """Another stream than the one on which the backward pass goes on."""
    net, swapped, _ = both(way)
    device = swapped._swap._runner.latest[0].device
    used: list[Any] = []
    native_update = swapped._swap.adapter.step_batch

    def note(step: Any, call: Any) -> None:
        used.append(device.compute_stream())
        native_update(step, call)

    swapped._swap.adapter.step_batch = note
    train(net, swapped, 9)
    assert used
    assert all(stream == device.update_stream for stream in used)
    assert device.compute_stream() != device.update_stream


@EACH_WAY
def test_a_reader_on_the_stream_of_the_step_sees_updated_parameters(
    way: str, schedule: Schedule
) -> None:
    net, swapped, _ = both(way)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, swapped, 9)
    changed = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert all(changed)


def test_a_step_on_another_stream_gives_up_what_was_loaded_ahead(schedule: Schedule) -> None:
    net, swapped, native = both("prefetch")
    twin = network()
    other = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for number in range(5):
        train(twin, other, number)
    for model, optimizer in ((twin, other), (net, swapped)):
        optimizer.zero_grad()
        model(torch.ones(4, 16).to(DEVICE)).square().sum().backward()
        main = torch.accelerator.current_stream()
        side = torch.Stream(device=DEVICE)
        side.wait_stream(main)
        with side:
            optimizer.step()
        main.wait_stream(side)
    assert_same_bits(other, swapped)
    assert native is not other


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("plain", "zigzag")])
def test_without_memory_in_the_backward_pass_all_is_done_in_the_step(
    way: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When activations are still there; the backward pass itself does not fail."""
    net, swapped, native = both(way)
    twin = network()
    twin.load_state_dict(net.state_dict())
    alike = torch.optim.AdamW(twin.parameters(), lr=0.1)
    alike.load_state_dict(native.state_dict())
    kind = type(swapped._swap._runner.latest[0].device)
    restore, refused = kind.restore, []

    def full(device: Any, memory: Any) -> None:
        if stepping:
            restore(device, memory)
            return
        refused.append(memory)
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(kind, "restore", full)
    for number in range(5, 8):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 16, generator=generator).to(DEVICE)
        for model, optimizer in ((twin, alike), (net, swapped)):
            optimizer.zero_grad()
            stepping = False
            with caplog.at_level(logging.INFO, "swap_torch"):
                model(x).square().sum().backward()
            stepping = True
            optimizer.step()
        assert_same_bits(alike, swapped)
        # Once in each backward pass, not for each gradient.
        assert len(refused) == number - 4
    assert caplog.text.count("no room for an update to begin before step()") == 3
    monkeypatch.undo()
    for number in range(8, 10):
        train(twin, alike, number)
        train(net, swapped, number)
    assert_same_bits(alike, swapped)


# The times of an update.


def check_times(times: StepTimes | None) -> None:
    """None is negative, and none is longer than all."""
    assert times is not None
    parts = [getattr(times, field.name) for field in fields(times) if field.name != "batches"]
    assert all(0 <= part <= times.total + 1e-9 for part in parts)  # sums are rounded
    assert len(times.batches) > 1
    for batch in times.batches:
        assert 0 <= batch.load_start <= batch.load_end <= times.total
        assert 0 <= batch.update_start <= batch.update_end <= times.total
        assert 0 <= batch.store_start <= batch.store_end <= times.total


@EACH_WAY
def test_the_times_of_an_update_are_told_at_once_in_every_schedule(
    way: str, schedule: Schedule
) -> None:
    net, swapped, _ = both(way)
    for number in range(5, 9):
        train(net, swapped, number)
        check_times(swapped.swap_report().last_step)


@EACH_WAY
def test_times_are_those_of_the_latest_update_whatever_was_begun_or_brought_home_since(
    way: str, schedule: Schedule
) -> None:
    net, swapped, _ = both(way)
    for number in range(5, 8):
        train(net, swapped, number)
        times = swapped.swap_report().last_step
        check_times(times)
        swapped.zero_grad()
        net(torch.ones(4, 16).to(DEVICE)).square().sum().backward()
        assert swapped.swap_report().last_step == times
        if not WAYS[way].get("overlap_backward"):
            swapped.zero_grad()
            assert swapped.swap_report().last_step == times
        swapped.step()


@EACH_WAY
@pytest.mark.parametrize("begun", [False, True])
def test_a_pause_after_an_update_is_no_part_of_its_times(way: str, begun: bool) -> None:
    net, swapped, _ = both(way)
    began = perf_counter()
    train(net, swapped, 6)
    torch.accelerator.synchronize()
    took = perf_counter() - began
    sleep(2 * took)
    if begun:
        swapped.zero_grad()
        net(torch.ones(4, 16).to(DEVICE)).square().sum().backward()
    times = swapped.swap_report().last_step
    check_times(times)
    assert times.total <= took
