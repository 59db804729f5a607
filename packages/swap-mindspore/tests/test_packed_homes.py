# SPDX-License-Identifier: Apache-2.0
"""Packed homes: where bytes are, for states of several dtypes.

With nn.Adam, whose states have the dtypes of its parameters. Users cannot have it packed, since on
a card its kernels want whole tensors; on the CPU the arenas give them those.
"""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import Parameter, nn

from swap_core import align
from swap_mindspore import HostDevice, SwapOptimizerConfig
from swap_mindspore.adam import MindSporeNativeAdamAdapter
from swap_mindspore.engine import SwapEngine


def mixed(kit) -> list[Parameter]:
    """Half-precision and fp32 parameters in turn."""
    halves, wholes = kit.parameters(ms.float16), kit.parameters(ms.float32)
    return [pair[i % 2] for i, pair in enumerate(zip(halves, wholes, strict=True))]


def packed(optimizer: nn.Optimizer, **config: object) -> SwapEngine:
    options = SwapOptimizerConfig(**{"packed_swap": True, "min_numel": 0, **config})
    return SwapEngine(MindSporeNativeAdamAdapter(optimizer), options, HostDevice(poison=True))


@pytest.mark.parametrize("swap_times", [1, 2, 6])
def test_one_copy_for_each_dtype_of_a_batch_and_the_bits_of_native(kit, swap_times) -> None:
    native, optimizer = nn.Adam(mixed(kit), 0.01), nn.Adam(mixed(kit), 0.01)
    engine = packed(optimizer, swap_times=swap_times)
    for step in range(2):
        native(kit.gradients(native.parameters, step))
        engine.step(kit.gradients(optimizer.parameters, step))
    assert kit.bits_of(optimizer) == kit.bits_of(native)
    dtypes = [[t.host.dtype for t in batch.transfers] for batch in engine._plan.lane.batches]
    assert all(len(set(each)) == len(each) for each in dtypes)
    assert sum(map(len, dtypes)) == {1: 2, 2: 4, 6: 6}[swap_times]
    assert engine.ledger.copies_in == 2 * sum(map(len, dtypes))


def test_host_bytes_are_the_states_rounded_up(kit) -> None:
    optimizer = nn.Adam(mixed(kit), 0.01)
    before = [state.nbytes for state in kit.states_of(optimizer)]
    engine = packed(optimizer)
    assert engine.ledger.host_bytes == sum(map(align, before))
    spans = [state.slot.span for state in engine._table._all()]
    assert all(span.offset % 512 == 0 for span in spans)
