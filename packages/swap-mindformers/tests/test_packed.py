# SPDX-License-Identifier: Apache-2.0
"""Packed: segments, arenas that really alias, bytes by storage, copies, order, layouts."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest

from swap_core import align
from swap_mindspore import HostDevice
from swap_testkit import Tamper, check_order
from swap_testkit.mindspore import MindSporeRecordingDevice, record_updates


def watched(kit, module, **options):
    """Twins on a recording device, and a list that fills with the bytes held at each update."""
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(module, device=device, **options)
    record_updates(pair.swapped, device)
    held = []
    adapter = pair.swapped._swap.adapter
    recorded = adapter.step_batch

    def step_batch(step, call) -> None:
        arenas = {id(b.memory): b.memory for b in pair.swapped._swap._plan.lane.batches}
        held.append(sum(a._bytes.nbytes for a in arenas.values()))
        recorded(step, call)

    adapter.step_batch = step_batch
    return pair, device, held


def lane_of(pair):
    return pair.swapped._swap._plan.lane


def wholes_of(pair):
    return [transfer.host for batch in lane_of(pair).batches for transfer in batch.transfers]


@pytest.mark.parametrize("masters", [True, False], ids=["masters in", "masters out"])
@pytest.mark.parametrize(("swap_times", "buffers"), [(1, 2), (3, 2), (6, 2), (6, 3)])
def test_bytes_by_the_formula(kit, latest, swap_times, buffers, masters) -> None:
    pair, device, held = watched(
        kit,
        latest,
        swap_times=swap_times,
        staging_buffers=buffers,
        include_master_params=masters,
    )
    pair.step(2)
    report = pair.swapped.swap_report()
    sizes = report.batch_bytes
    assert len(sizes) == swap_times
    state_bytes = [s.nbytes for s in report.states if s.stays is None]
    assert len(state_bytes) == 6 * (3 if masters else 2)
    assert sum(sizes) == sum(map(align, state_bytes)) == report.host_bytes
    ring = min(buffers, swap_times)
    formula = sum(max(sizes[first::ring]) for first in range(ring))
    assert max(held) == report.peak_device_bytes == formula
    assert report.idle_device_bytes == kit.device_bytes(pair.swapped) == 0
    assert report.ledger.copies_in == report.ledger.copies_out == 2 * swap_times
    assert report.ledger.bytes_loaded == report.ledger.bytes_stored == 2 * sum(sizes)
    assert not check_order(device.log)


def test_per_tensor_peak_is_two_adjacent_batches(kit, latest) -> None:
    pair = kit.make_twins(latest, packed_swap=False, include_master_params=True)
    held = []
    adapter = pair.swapped._swap.adapter
    update = adapter.update
    adapter.update = lambda step, member: (
        held.append(kit.device_bytes(pair.swapped)),
        update(step, member),
    )
    pair.step(1)
    report = pair.swapped.swap_report()
    sizes = report.batch_bytes
    assert sum(sizes) == sum(s.nbytes for s in report.states)
    assert max(held) == report.peak_device_bytes == max(a + b for a, b in pairwise(sizes))


def test_the_report_shows_masters_apart(kit, latest) -> None:
    pair = kit.make_twins(latest, dtypes=kit.MIXED, min_numel=40, include_master_params=True)
    masters = [p.size * 4 for i, p in enumerate(pair.native.parameters) if i % 3 != 1]
    swapping = sum(nbytes for nbytes in masters if nbytes >= 160)
    report = pair.swapped.swap_report()
    assert report.master_bytes == (swapping, sum(masters) - swapping)
    assert f"masters    {swapping / 1024:.1f} KiB of these swap" in str(report)
    out = kit.make_twins(latest, dtypes=kit.MIXED).swapped.swap_report()
    assert out.master_bytes == (0, sum(masters))
    assert "masters" not in str(kit.make_twins(latest, dtypes=kit.FP32).swapped.swap_report())


def test_a_segment_is_contiguous_and_its_states_are_in_it(kit, latest) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    (first, *_), whole = lane_of(pair).calls, wholes_of(pair)[0]
    optimizer = pair.swapped
    offset = whole.data_ptr()
    for member in first.members:
        index = member.position
        for state in (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.fp32_params):
            assert state[index].data_ptr() == offset
            assert offset % 4 == (offset - whole.data_ptr()) % 512 == 0
            offset += align(state[index].nbytes)
    assert offset == whole.data_ptr() + whole.nbytes


def test_an_update_writes_through_the_arena(kit, latest) -> None:
    """The Parameters that the kernel gets and the arena that is copied are the same bytes."""
    pair = kit.make_twins(latest)
    seen = []
    adapter = pair.swapped._swap.adapter
    update = adapter.update

    def aliased(step, member) -> None:
        arena = lane_of(pair).batches[0].memory
        if member.position == lane_of(pair).calls[0].members[0].position:
            update(step, member)
            moment = member.states["exp_avg"]
            values = moment.asnumpy()
            held = arena._bytes[: values.nbytes].view(np.float32)
            seen.append(np.array_equal(held, values.ravel()) and values.any())
            assert moment.data_ptr() == arena._bytes.ctypes.data
        else:
            update(step, member)

    adapter.update = aliased
    pair.step(1)
    assert seen == [True]


def test_arena_memory_is_really_given_back(kit, latest) -> None:
    pair = kit.make_twins(latest)
    arena = lane_of(pair).batches[0].memory
    alive = []
    adapter = pair.swapped._swap.adapter
    update = adapter.update
    adapter.update = lambda step, member: (
        alive.append(weakref.ref(arena._bytes)),
        update(step, member),
    )
    pair.step(1)
    gc.collect()
    assert len(alive) == 6
    assert all(ref() is None for ref in alive)


def test_the_layout_is_made_once_while_batches_do_not_change(kit, latest) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    before = [whole.data_ptr() for whole in wholes_of(pair)]
    pair.step(3)
    ledger = pair.swapped.swap_report().ledger
    assert ledger.plans_built == 1
    assert ledger.host_allocations == len(before) == 3
    assert [whole.data_ptr() for whole in wholes_of(pair)] == before


@pytest.mark.parametrize("packed", [True, False])
def test_the_layout_is_made_anew_when_other_parameters_are_updated(kit, latest, packed) -> None:
    pair = kit.make_twins(latest, include_master_params=True, packed_swap=packed)
    pair.step(1)
    frozen = [p.float().asnumpy().tobytes() for p in pair.swapped.parameters]
    for optimizer in (pair.native, pair.swapped):
        optimizer.optim_filter = (False, True, True, False, True, True)
    pair.step(2)
    report = pair.swapped.swap_report()
    assert report.ledger.plans_built == 2
    assert sum(len(call.members) for call in lane_of(pair).calls) == 4
    everything = sum(align(s.nbytes) if packed else s.nbytes for s in report.states)
    assert report.host_bytes == everything  # the others' states are on the host as before
    assert report.ledger.bytes_loaded < 3 * everything
    for index in (0, 3):
        assert pair.swapped.parameters[index].float().asnumpy().tobytes() == frozen[index]
    for optimizer in (pair.native, pair.swapped):
        optimizer.optim_filter = (True,) * 6
    pair.step(1)
    assert pair.swapped.swap_report().ledger.plans_built == 3


def test_an_update_of_no_parameter_counts(kit, latest) -> None:
    pair = kit.make_twins(latest)
    for optimizer in (pair.native, pair.swapped):
        optimizer.optim_filter = (False,) * 6
    pair.step(1)
    assert pair.swapped.global_step.asnumpy()[0] == 1


def test_no_host_memory_for_another_layout_changes_nothing(kit, latest) -> None:
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(latest, device=device)
    pair.step(1)
    before = kit.bits_of(pair.swapped)
    pair.swapped.optim_filter = (False, *(True,) * 5)
    device.tamper = Tamper("allocate_host", 1, MemoryError("no host memory"))
    with pytest.raises(MemoryError, match="no host memory"):
        pair.swapped(kit.gradients(pair.swapped.parameters, 1))
    device.tamper = None
    assert kit.bits_of(pair.swapped) == before
    pair.native.optim_filter = pair.swapped.optim_filter
    pair.step(1)


@pytest.mark.parametrize("verb", ["copy_in", "copy_out"])
def test_a_copy_that_is_left_out_shows(kit, latest, verb) -> None:
    device = MindSporeRecordingDevice(HostDevice(poison=True))
    pair = kit.make_twins(latest, device=device, include_master_params=True)
    pair.step(1)
    device.tamper = Tamper(verb, 1)
    with pytest.raises(AssertionError):
        pair.step(1)
    assert device.tamper.fired == 1
