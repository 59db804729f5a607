# SPDX-License-Identifier: Apache-2.0
"""Errors inside an update: nothing lost, nothing held, and training can go on."""

from __future__ import annotations

import pytest

from swap_mindspore import HostDevice
from swap_testkit import Tamper
from swap_testkit.mindspore import MindSporeRecordingDevice

ways = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


class PlantedError(Exception):
    pass


def failing_twins(kit, module, packed):
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(module, device=device, packed_swap=packed, include_master_params=True)
    pair.step(1)
    return pair, device


def families(kit, optimizer) -> list[tuple]:
    """For each parameter its own bits and those of its states."""
    bits = kit.bits_of(optimizer)
    prefixes = ("", "main_param.", "adam_m.", "adam_v.")
    return [tuple(bits[f"{p}{param.name}"] for p in prefixes) for param in optimizer.parameters]


@ways
@pytest.mark.parametrize("verb", ["restore", "copy_in", "copy_out", "release"])
def test_an_error_in_a_verb(kit, latest, packed, verb) -> None:
    """Each parameter is wholly updated or not at all, as its batch was."""
    pair, device = failing_twins(kit, latest, packed)
    before = families(kit, pair.native)
    pair.native(kit.gradients(pair.native.parameters, 1))
    after = families(kit, pair.native)
    device.tamper = Tamper(verb, 1, PlantedError("planted"))
    with pytest.raises(PlantedError):
        pair.swapped(kit.gradients(pair.swapped.parameters, 1))
    device.tamper = None
    found = families(kit, pair.swapped)
    updated = [one == new for one, new in zip(found, after, strict=True)]
    assert all(
        f == (a if u else b) for f, a, b, u in zip(found, after, before, updated, strict=True)
    )
    assert updated == sorted(updated, reverse=True)
    assert kit.device_bytes(pair.swapped) == 0
    assert pair.swapped.swap_report().idle_device_bytes == 0
    pair.swapped(kit.gradients(pair.swapped.parameters, 2))  # and it goes on, without a warning


@ways
@pytest.mark.parametrize("updated", [0, 3, 5])
def test_an_error_in_the_update_of_a_parameter(kit, latest, packed, updated, monkeypatch) -> None:
    pair, _ = failing_twins(kit, latest, packed)
    adapter = pair.swapped._swap.adapter
    update = adapter.update

    def failing(step, member) -> None:
        if member.position == updated:
            raise PlantedError("planted")
        update(step, member)

    pair.native(kit.gradients(pair.native.parameters, 1))
    after = families(kit, pair.native)
    with monkeypatch.context() as patched:
        patched.setattr(adapter, "update", failing)
        with pytest.raises(PlantedError):
            pair.swapped(kit.gradients(pair.swapped.parameters, 1))
    assert families(kit, pair.swapped)[:updated] == after[:updated]
    assert families(kit, pair.swapped)[updated] != after[updated]
    assert pair.swapped.global_step.asnumpy()[0] == 2
    assert kit.device_bytes(pair.swapped) == 0
    pair.swapped(kit.gradients(pair.swapped.parameters, 2))


def test_masters_that_stay_are_rounded_after_an_error_by_the_next_update(kit, latest) -> None:
    """Natively an error leaves masters ahead of the model; that is no sign of loaded weights."""
    pair = kit.make_twins(latest)
    pair.step(1)
    adapter = pair.swapped._swap.adapter
    update = adapter.update

    def failing(step, member) -> None:
        if member.position == 3:
            raise PlantedError("planted")
        update(step, member)

    adapter.update = failing
    with pytest.raises(PlantedError):
        pair.swapped(kit.gradients(pair.swapped.parameters, 1))
    adapter.update = update
    pair.swapped(kit.gradients(pair.swapped.parameters, 2))  # warnings are errors
    for param, master in zip(pair.swapped.parameters, pair.swapped.fp32_params, strict=True):
        rounded = master.astype(param.dtype).float().asnumpy()
        assert rounded.tobytes() == param.float().asnumpy().tobytes()


def test_a_full_card_names_the_arena_and_the_knob(kit, latest) -> None:
    pair, device = failing_twins(kit, latest, True)
    before = kit.bits_of(pair.swapped)
    device.tamper = Tamper("restore", 0, MemoryError("full"))
    with pytest.raises(MemoryError, match=r"staging arena 0 .*bytes\).*Raise swap_times"):
        pair.swapped(kit.gradients(pair.swapped.parameters, 1))
    device.tamper = None
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)


def test_host_memory_that_runs_out_while_wrapping_changes_nothing(kit, latest) -> None:
    from swap_mindformers import SwapOptimizerConfig, swap_optimizer

    optimizer = kit.make_adamw(latest)
    addresses = [state.data_ptr() for state in (*optimizer.exp_avg, *optimizer.fp32_params)]
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    device.tamper = Tamper("allocate_host", 2, MemoryError("no host memory"))
    config = SwapOptimizerConfig(min_numel=0, include_master_params=True)
    with pytest.raises(MemoryError, match="no host memory"):
        swap_optimizer(optimizer, config, device=device)
    now = [state.data_ptr() for state in (*optimizer.exp_avg, *optimizer.fp32_params)]
    assert now == addresses
    optimizer(kit.gradients(optimizer.parameters, 0))
