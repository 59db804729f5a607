# SPDX-License-Identifier: Apache-2.0
"""Bytes, counted storage by storage, and the order in which they move."""

from __future__ import annotations

from itertools import pairwise

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from swap_core import StayReason
from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer
from swap_testkit import Tamper, check_order
from swap_testkit.mindspore import MindSporeRecordingDevice, record_updates

SHAPES = ((64, 32), (700,), (33, 50), (1024,), (5, 5, 40))


def watched(kit, optimizer_class, **config):
    """Twins on a recording device, and a list that fills with the bytes held at each update."""
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(optimizer_class, shapes=SHAPES, device=device, **config)
    record_updates(pair.swapped, device)
    held = []
    adapter = pair.swapped._swap.adapter
    recorded = adapter.step_batch

    def step_batch(step, call) -> None:
        held.append(kit.device_bytes(pair.swapped))
        recorded(step, call)

    adapter.step_batch = step_batch
    return pair, device, held


@pytest.mark.parametrize("optimizer_class", [nn.Adam, nn.AdamWeightDecay])
@pytest.mark.parametrize("swap_times", [1, 2, 3, 5])
def test_peak_is_two_adjacent_batches_and_idle_is_zero(kit, optimizer_class, swap_times) -> None:
    pair, device, held = watched(kit, optimizer_class, swap_times=swap_times)
    assert kit.device_bytes(pair.swapped) == 0
    pair.step(2)
    report = pair.swapped.swap_report()
    sizes = report.batch_bytes
    assert len(sizes) == swap_times
    assert sum(sizes) == sum(state.nbytes for state in kit.states_of(pair.native))
    formula = max([a + b for a, b in pairwise(sizes)], default=sizes[0])
    # held[0] is the call for states that stay, of which there are none; batch 0 is loading.
    assert max(held) == formula == report.peak_device_bytes
    assert report.idle_device_bytes == kit.device_bytes(pair.swapped) == 0
    assert report.ledger.bytes_loaded == report.ledger.bytes_stored == 2 * sum(sizes)
    assert report.ledger.copies_in == report.ledger.copies_out == 2 * 2 * len(SHAPES)
    assert not check_order(device.log)


def test_host_bytes_are_the_bytes_of_the_states(kit) -> None:
    pair = kit.make_twins(lambda ps: nn.Adam(ps, use_amsgrad=True), min_numel=26)
    pair.step(1)
    report = pair.swapped.swap_report()
    swapping = [s for s in kit.states_of(pair.native) if s.size >= 26]
    assert report.host_bytes == report.swapped_bytes == sum(s.nbytes for s in swapping)
    assert report.stay_counts() == {StayReason.TOO_SMALL: 6}
    allocations = report.ledger.host_allocations
    pair.step(2)
    after = pair.swapped.swap_report().ledger
    assert (after.host_allocations, after.plans_built) == (allocations, 1)


def test_the_memory_from_before_wrapping_is_free_and_the_host_is_shown(kit) -> None:
    optimizer = nn.Adam(kit.parameters(), 0.01)
    params = kit.states_of(optimizer)
    names = [param.name for param in params]
    before = [param.data_ptr() for param in params]
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=HostDevice(poison=True))
    assert kit.states_of(optimizer) == params  # the very objects
    assert [param.name for param in params] == names
    table = optimizer._swap._table._swapped
    hosts = {s.param.name: s.host for states in table.values() for s in states}
    for param, old in zip(params, before, strict=True):
        assert param.data_ptr() == hosts[param.name].data_ptr() != old
    held = params[0]
    optimizer(kit.gradients(optimizer.parameters, 0))
    assert np.isfinite(held.asnumpy()).all()  # one who held it reads the new values
    assert held.asnumpy().any()
    assert (held + 0).asnumpy().tobytes() == held.asnumpy().tobytes()
    assert held.clone().asnumpy().tobytes() == held.asnumpy().tobytes()


def test_states_that_share_memory_stay(kit) -> None:
    optimizer = nn.Adam(kit.parameters(), 0.01)
    shared = Tensor(np.zeros((33, 17), np.float32))
    optimizer.moment1[0].set_data(shared)
    optimizer.moment2[0].set_data(shared)
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=HostDevice())
    states = optimizer.swap_report().states
    assert [s.stays for s in states[:3]] == [StayReason.SHARES_STORAGE] * 2 + [None]


@pytest.mark.parametrize("verb", ["copy_in", "copy_out"])
@pytest.mark.parametrize("nth", [0, 2])
def test_a_copy_that_is_left_out_shows(kit, verb, nth) -> None:
    """The oracle: without the poison, MindSpore's memory would still hold the right values."""
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(nn.Adam, device=device)
    pair.step(1)
    device.tamper = Tamper(verb, nth)
    with pytest.raises(AssertionError):
        pair.step(1)
    assert device.tamper.fired == 1


def test_without_poison_a_load_that_is_left_out_may_go_unseen(kit) -> None:
    """Why tests poison: memory that is freed and taken again still holds what it held."""
    device = MindSporeRecordingDevice(HostDevice())
    pair = kit.make_twins(nn.Adam, device=device, swap_times=1, shapes=((40, 40),))
    pair.step(1)
    device.tamper = Tamper("copy_in", 0)
    pair.step(1)
    assert device.tamper.fired == 1


def test_the_report_tells_it_in_words(kit) -> None:
    pair = kit.make_twins(nn.Adam, min_numel=26)
    assert pair.swapped.swap_report().last_step is None
    pair.step(1)
    report = pair.swapped.swap_report()
    assert report.last_step is not None
    assert report.last_step.total > 0
    text = str(report)
    assert "mindspore.nn.Adam, per tensor swap" in text
    assert "(pageable)" in text
    assert repr(pair.swapped) == (
        "Adam(swapped: per tensor, swap_times=3, 11.4 KiB on host, 6 params)"
    )


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32])
def test_bytes_follow_the_dtype(kit, dtype) -> None:
    pair = kit.make_twins(nn.Adam, dtype=dtype)
    width = 2 if dtype == ms.float16 else 4
    numbers = sum(p.size for p in pair.native.parameters)
    assert pair.swapped.swap_report().host_bytes == 2 * width * numbers
