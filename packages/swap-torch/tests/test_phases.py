# SPDX-License-Identifier: Apache-2.0
"""``reload()``, ``offload()`` and ``states_on_device()``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW, Optimizer

from swap_core import StayReason
from swap_testkit import Tamper
from swap_testkit.torch import CpuAsDevice, TorchRecordingDevice
from swap_torch import SwapOptimizerConfig

SHAPES = [(3, 50), (), (40,), (7, 2), (200,)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
SOME = [True, True, False, True, True]


def config(packed: bool = True, **options: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(**{"min_numel": 8, "swap_times": 3, **options}, packed_swap=packed)


def host_addresses(optimizer: Any) -> set[int]:
    homes = optimizer._swap._table.homes
    return {home.host.data_ptr() for home in homes._all()}


def addresses(optimizer: Optimizer) -> set[int]:
    return {
        value.data_ptr()
        for state in optimizer.state.values()
        for value in state.values()
        if value.numel() > 8
    }


def on_host(optimizer: Optimizer) -> bool:
    """All states that swap are in the optimizer's host memory; None of them, if it is False."""
    shown, host = addresses(optimizer), host_addresses(optimizer)
    assert shown <= host or not shown & host
    return shown <= host


KINDS = {
    "AdamW": (AdamW, {}),
    "Adam, AMSGrad": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "fused": (AdamW, {"fused": True}),
}


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_phases_keep_the_bits(
    twins: Callable[..., Any], train: Callable[..., None], kind: str, packed: bool
) -> None:
    optimizer_class, options = KINDS[kind]
    pair = twins(SHAPES, optimizer_class, config=config(packed), **options)
    train(pair, 1, SOME)
    for _ in range(2):
        pair.swapped.reload()
        pair.check()
        assert not on_host(pair.swapped)
        moved = pair.device.copies_in, pair.device.copies_out
        train(pair, 2)  # a state is born on the device
        train(pair, 1, SOME)
        assert moved == (pair.device.copies_in, pair.device.copies_out)
        assert not on_host(pair.swapped)
        pair.swapped.offload()
        pair.check()
        assert on_host(pair.swapped)
        train(pair, 2)
        assert moved != (pair.device.copies_in, pair.device.copies_out)
        assert on_host(pair.swapped)


@BOTH
def test_any_number_of_times_and_before_the_first_step(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    for first in ("offload", "reload"):
        fresh = twins(SHAPES, config=config(packed))
        for _ in range(2):
            getattr(fresh.swapped, first)()
            assert not fresh.swapped.state
        train(fresh, 2)
        assert on_host(fresh.swapped) == (first == "offload")
    train(pair, 1)
    for phase, host in (("offload", True), ("reload", False), ("offload", True)):
        for _ in range(3):
            getattr(pair.swapped, phase)()
            assert on_host(pair.swapped) == host
            pair.check()
    train(pair, 2)


@BOTH
def test_host_memory_is_kept_and_used_again(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    before = pair.swapped.swap_report().ledger
    for _ in range(3):
        pair.swapped.reload()
        train(pair, 1)
        pair.swapped.offload()
        train(pair, 1)
    after = pair.swapped.swap_report().ledger
    assert before.host_allocations == after.host_allocations
    assert pair.device.host_bytes == before.host_bytes == after.host_bytes


@BOTH
def test_report_and_repr_say_so(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 1)
    how = "packed" if packed else "per tensor"
    assert f"(swapped: {how}, swap_times=3, " in repr(pair.swapped)
    counts = pair.swapped.swap_report().stay_counts()
    pair.swapped.reload()
    assert f"(swapped: {how}, now on the device, swap_times=3, " in repr(pair.swapped)
    report = pair.swapped.swap_report()
    assert report.stay_counts() == {**counts, StayReason.RELOADED: 8}
    assert report.swapped_bytes == 0
    pair.swapped.offload()
    assert ", now offloaded, " in repr(pair.swapped)
    assert pair.swapped.swap_report().stay_counts() == counts
    train(pair, 1)
    assert "now" not in repr(pair.swapped)


# states_on_device


@BOTH
@pytest.mark.parametrize("before", ["swapped", "reload", "offload"])
def test_states_on_device_for_a_while(
    twins: Callable[..., Any], train: Callable[..., None], before: str, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    if before != "swapped":
        getattr(pair.swapped, before)()
    with pair.swapped.states_on_device():
        assert not on_host(pair.swapped)
        for optimizer in (pair.native, pair.swapped):
            for state in optimizer.state.values():
                state["exp_avg"].mul_(2)  # edits in place
                state["exp_avg_sq"] = state["exp_avg_sq"] + 1
        pair.check()
    assert on_host(pair.swapped) == (before != "reload")
    pair.check()
    train(pair, 2)
    with pair.swapped.states_on_device():
        train(pair, 2)
    assert on_host(pair.swapped) == (before != "reload")
    train(pair, 2)


def test_states_on_device_ends_with_an_error(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins(SHAPES, config=config())
    train(pair, 1)
    with pytest.raises(KeyError, match="planted"), pair.swapped.states_on_device():
        raise KeyError("planted")
    assert on_host(pair.swapped)
    train(pair, 2)


# With everything else.


@BOTH
@pytest.mark.parametrize("phase", ["reload", "offload"])
def test_state_dicts(
    twins: Callable[..., Any], train: Callable[..., None], phase: str, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    taken = [(pair.swapped.state_dict(), copy.deepcopy(pair.native.state_dict()))]
    getattr(pair.swapped, phase)()
    taken.append((pair.swapped.state_dict(), copy.deepcopy(pair.native.state_dict())))
    train(pair, 2)
    pair.swapped.offload()
    train(pair, 2)
    for state_dict, expected in taken:
        for index, entry in expected["state"].items():
            for key, value in entry.items():
                assert torch.equal(state_dict["state"][index][key], value)
    getattr(pair.swapped, phase)()
    for optimizer in (pair.native, pair.swapped):
        optimizer.load_state_dict(copy.deepcopy(taken[0][1]))
    pair.check()
    assert on_host(pair.swapped) == (phase == "offload")
    train(pair, 2)
    pair.swapped.offload()
    assert on_host(pair.swapped)
    train(pair, 1)


@BOTH
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("phase", ["reload", "offload"])
def test_copies_swap(
    twins: Callable[..., Any],
    train: Callable[..., None],
    phase: str,
    how: Callable[[Any], Any],
    packed: bool,
) -> None:
    pair = twins(SHAPES, config=config(packed), device=CpuAsDevice(poison=True))
    train(pair, 2)
    getattr(pair.swapped, phase)()
    other = type(pair)(how(pair.native), how(pair.swapped), pair.device, pair.steps)
    other.check()
    assert on_host(other.swapped)
    train(other, 2)
    pair.check()
    train(pair, 1)


@BOTH
def test_groups_and_parameters_that_change(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    pair.swapped.reload()
    for optimizer in (pair.native, pair.swapped):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(30))]})
        group = optimizer.param_groups[0]
        old, new = group["params"][0], torch.nn.Parameter(group["params"][0].detach() * 2)
        optimizer.state[new] = optimizer.state.pop(old)
        group["params"][0] = new
    train(pair, 2)
    pair.swapped.offload()
    assert on_host(pair.swapped)
    train(pair, 2)


@BOTH
def test_a_phase_that_cannot_be_entered_changes_nothing(
    twins: Callable[..., Any],
    train: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
) -> None:
    device = TorchRecordingDevice(CpuAsDevice())
    pair = twins(SHAPES, config=config(packed), device=device)
    train(pair, 2)
    native, calls = torch.empty_strided, []

    def no_room(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("planted")
        return native(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_strided", no_room)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"reload\(\).*exp_avg_sq of group 0, parameter 2.*160 B"
    ):
        pair.swapped.reload()
    monkeypatch.undo()
    assert on_host(pair.swapped)
    train(pair, 2)
    pair.swapped.reload()
    kept = dict(pair.swapped.state)
    state_dict = pair.swapped.state_dict()
    train(pair, 1)
    pair.swapped._swap._table.homes.settle({}, only=True)  # host memory must be allocated anew
    device.tamper = Tamper("allocate_host", 0, MemoryError("planted"))
    with pytest.raises(MemoryError, match="planted"):
        pair.swapped.offload()
    device.tamper = None
    train(pair, 2)
    assert not on_host(pair.swapped)
    pair.swapped.offload()
    train(pair, 1)
    del kept, state_dict
