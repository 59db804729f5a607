# SPDX-License-Identifier: Apache-2.0
"""Whatever fails inside an update: states stay readable, nothing is held, the next update works."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import Parameter, nn

from swap_core import StateLostError
from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer
from swap_testkit import Tamper
from swap_testkit.mindspore import MindSporeRecordingDevice


class PlantedError(Exception):
    """Raised by the tests, and by nothing else."""


def failing_twins(kit, make=nn.Adam):
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(make, device=device)
    pair.step(1)
    return pair, device


def families(kit, optimizer) -> list[tuple[bytes, ...]]:
    """For each parameter the bytes of it and its states."""
    count = len(optimizer.parameters)
    bits = [
        tensor.asnumpy().tobytes() for tensor in (*optimizer.parameters, *kit.states_of(optimizer))
    ]
    return [tuple(bits[index::count]) for index in range(count)]


def check_after_failure(kit, pair, before) -> int:
    """Each parameter was updated with its states, or neither was; tells how many were."""
    after = families(kit, pair.native)
    now = families(kit, pair.swapped)
    updated = 0
    for old, new, found in zip(before, after, now, strict=True):
        assert found in (old, new)
        updated += found == new
    assert kit.device_bytes(pair.swapped) == 0
    assert pair.swapped.swap_report().idle_device_bytes == 0
    return updated


def go_on(kit, pair) -> None:
    """Load the native twin's values into the swapped one; both then step alike."""
    values = {
        p.name: Parameter(p.asnumpy().copy(), name=p.name) for p in pair.native.get_parameters()
    }
    assert ms.load_param_into_net(pair.swapped, values, strict_load=True) == ([], [])
    pair.steps += 1
    pair.step(2)


@pytest.mark.parametrize("verb", ["restore", "copy_in", "copy_out", "record", "wait", "release"])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_an_error_in_a_verb(kit, verb, nth) -> None:
    pair, device = failing_twins(kit)
    before = families(kit, pair.native)
    pair.native(kit.gradients(pair.native.parameters, pair.steps))
    device.tamper = Tamper(verb, nth, PlantedError("planted"))
    with pytest.raises(PlantedError):
        pair.swapped(kit.gradients(pair.swapped.parameters, pair.steps))
    assert device.tamper.fired == 1
    device.tamper = None
    check_after_failure(kit, pair, before)
    go_on(kit, pair)


@pytest.mark.parametrize("make", [nn.Adam, nn.AdamWeightDecay])
@pytest.mark.parametrize("updated", [0, 3, 5])
def test_an_error_in_the_update_of_a_parameter(kit, make, updated, monkeypatch) -> None:
    pair, _ = failing_twins(kit, make)
    before = families(kit, pair.native)
    pair.native(kit.gradients(pair.native.parameters, pair.steps))
    adapter = pair.swapped._swap.adapter
    native = adapter.update

    def update(step, member) -> None:
        if member.position == updated:
            raise PlantedError("planted")
        native(step, member)

    monkeypatch.setattr(adapter, "update", update)
    with pytest.raises(PlantedError):
        pair.swapped(kit.gradients(pair.swapped.parameters, pair.steps))
    monkeypatch.undo()
    assert check_after_failure(kit, pair, before) == updated
    assert pair.swapped.global_step.asnumpy()[0] == 2
    go_on(kit, pair)


def test_an_error_before_the_first_batch_leaves_the_counters(kit) -> None:
    pair, device = failing_twins(kit)
    before = kit.bits_of(pair.swapped)
    device.tamper = Tamper("restore", 0, MemoryError("full"))
    with pytest.raises(MemoryError, match=r"batch 0 of 3 \(.* bytes\).*Raise swap_times"):
        pair.swapped(kit.gradients(pair.swapped.parameters, pair.steps))
    device.tamper = None
    assert kit.bits_of(pair.swapped) == before
    pair.step(2)


def test_a_card_that_is_full_and_says_nothing(kit, monkeypatch) -> None:
    """MindSpore's resize_ returns silently then, so sizes are checked."""
    pair, _ = failing_twins(kit)
    before = kit.bits_of(pair.swapped)
    monkeypatch.setattr("swap_mindspore.device._resize", lambda storage, nbytes: None)
    with pytest.raises(MemoryError, match="batch 0 of 3"):
        pair.swapped(kit.gradients(pair.swapped.parameters, pair.steps))
    monkeypatch.undo()
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)


def test_host_memory_that_runs_out_while_wrapping_changes_nothing(kit) -> None:
    optimizer = nn.Adam(kit.parameters(), 0.01)
    addresses = [state.data_ptr() for state in kit.states_of(optimizer)]
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    device.tamper = Tamper("allocate_host", 5, MemoryError("no host memory"))
    with pytest.raises(MemoryError, match="no host memory"):
        swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=device)
    assert [state.data_ptr() for state in kit.states_of(optimizer)] == addresses
    device.tamper = None
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=device)
    native = nn.Adam(kit.parameters(), 0.01)
    for each in (optimizer, native):
        each(kit.gradients(each.parameters, 0))
    assert kit.bits_of(optimizer) == kit.bits_of(native)


def test_a_store_that_fails_twice_says_that_states_are_lost(kit) -> None:
    pair, device = failing_twins(kit)
    device.tamper = Tamper("copy_out", 1, PlantedError("planted"), times=2)
    with pytest.raises(StateLostError, match="Go on from a checkpoint"):
        pair.swapped(kit.gradients(pair.swapped.parameters, pair.steps))
    assert kit.device_bytes(pair.swapped) == 0
