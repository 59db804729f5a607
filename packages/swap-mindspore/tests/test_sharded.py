# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's DTensor by a stand-in: the storage of this rank's shard is what moves.

The real class cannot be made on the CPU build. What is imitated: a Parameter whose Python side has
the global shape, whose ``_local_tensor`` is the shard, and whose ``set_data`` replaces the shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer

RANKS = 2


class DTensor:
    """What makes a Parameter sharded along its first dimension."""

    _local_tensor: Tensor
    has_init = False

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = self._local_tensor.shape
        return (RANKS * first, *rest)

    def to_local(self) -> Tensor:
        return self._local_tensor

    def asnumpy(self) -> Any:
        return self._local_tensor.asnumpy()

    def set_data(self, data: Tensor, slice_shape: bool = False) -> None:
        self._local_tensor._update_data(data)
        self._update_data(data)  # type: ignore[attr-defined]

    def clone(self, init: str = "same") -> Any:
        assert init == "zeros"
        return sharded(np.zeros(self._local_tensor.shape, np.float32), self.name)  # type: ignore[attr-defined]


class ParameterDTensor(DTensor, Parameter):
    pass


def sharded(values: Any, name: str) -> ParameterDTensor:
    local = Tensor(values)
    param = Parameter(local, name=name)
    param._local_tensor = local
    param.set_data(local)
    param.__class__ = ParameterDTensor
    return param


def shards(kit) -> list[Any]:
    return [sharded(p.asnumpy().copy(), p.name) for p in kit.parameters()]


@pytest.mark.parametrize(
    "make",
    [lambda ps: nn.Adam(ps, 0.01, weight_decay=0.1), lambda ps: nn.AdamWeightDecay(ps, 0.01)],
)
@pytest.mark.parametrize("sharded_gradients", [False, True])
def test_local_shards_move(kit, make, sharded_gradients) -> None:
    native = make(kit.parameters())  # the shards as plain parameters
    optimizer = make(shards(kit))
    assert type(kit.states_of(optimizer)[0]) is ParameterDTensor
    config = SwapOptimizerConfig(min_numel=30, swap_times=3)
    swap_optimizer(optimizer, config, device=HostDevice(poison=True))
    for step in range(2):
        given = kit.gradients(native.parameters, step)
        native(given)
        if sharded_gradients:
            given = tuple(sharded(g.asnumpy(), f"g{i}") for i, g in enumerate(given))
        optimizer(given)
    assert kit.bits_of(optimizer) == kit.bits_of(native)
    assert kit.device_bytes(optimizer) == 0
    report = optimizer.swap_report()
    first = report.states[0]
    assert (first.shape, first.nbytes) == ((33, 17), 33 * 17 * 4)
    assert optimizer.parameters[0].shape == (66, 17)
    assert report.host_bytes == sum(s.nbytes for s in report.states if s.stays is None)
    state = kit.states_of(optimizer)[0]
    table = optimizer._swap._table._swapped
    assert state.to_local().data_ptr() == table[0][0].host.data_ptr()


def test_a_shard_that_is_loaded_is_adopted(kit) -> None:
    optimizer = nn.Adam(shards(kit), 0.01)
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=HostDevice(poison=True))
    values = Tensor(np.full((33, 17), 0.5, np.float32))
    optimizer.moment1[0].set_data(values)
    optimizer(tuple(Tensor(np.zeros(p.to_local().shape, np.float32)) for p in optimizer.parameters))
    assert np.allclose(optimizer.moment1[0].asnumpy(), 0.45)
    assert (values.asnumpy() == 0.5).all()


def test_a_gradient_of_the_global_shape_is_refused(kit) -> None:
    optimizer = nn.Adam(shards(kit), 0.01)
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=HostDevice(poison=True))
    whole = tuple(Tensor(np.zeros(p.shape, np.float32)) for p in optimizer.parameters)
    with pytest.raises(ValueError, match=r"shape \(66, 17\), but the parameter has \(33, 17\)"):
        optimizer(whole)
