# SPDX-License-Identifier: Apache-2.0
"""Parameters that are HyperParallel's DTensors, by a stand-in: each rank's shard is what counts.

The real class cannot be made on the CPU build. What is imitated: a Parameter whose Python side has
the global shape, and whose ``to_local()`` is the shard.
"""

from __future__ import annotations

import sys
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from swap_mindformers import SwapOptimizerConfig, swap_optimizer
from swap_mindspore import HostDevice

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

    def float(self) -> Tensor:
        return self._local_tensor.float()

    def asnumpy(self) -> Any:
        return self._local_tensor.asnumpy()

    def set_data(self, data: Tensor, slice_shape: bool = False) -> None:
        self._local_tensor._update_data(data)
        self._update_data(data)  # type: ignore[attr-defined]


class ParameterDTensor(DTensor, Parameter):
    pass


def sharded(param: Parameter) -> ParameterDTensor:
    local = Tensor(param.float().asnumpy().copy()).astype(param.dtype)
    other = Parameter(local, name=param.name)
    other._local_tensor = local
    other.set_data(local)
    other.__class__ = ParameterDTensor
    return other


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("masters", [True, False])
def test_the_local_shard_is_updated_and_watched(kit, latest, monkeypatch, packed, masters) -> None:
    compat = sys.modules["mindformers.pynative.dtensor_compat"]
    monkeypatch.setattr(compat, "DTensor", DTensor)
    native = kit.make_adamw(latest)  # the shards as plain parameters
    optimizer = kit.make_adamw(latest, lambda params: list(map(sharded, params)))
    optimizer.fp32_params = tuple(map(sharded, optimizer.fp32_params))
    assert type(optimizer.parameters[0]) is ParameterDTensor
    assert optimizer.parameters[0].shape == (66, 17)
    config = SwapOptimizerConfig(
        min_numel=0, swap_times=3, packed_swap=packed, include_master_params=masters
    )
    swap_optimizer(optimizer, config, device=HostDevice(poison=True))
    for step in range(2):
        given = kit.gradients(native.parameters, step)
        native(given)
        optimizer(given)
    for one, other in zip(native.parameters, optimizer.parameters, strict=True):
        assert np.array_equal(one.float().asnumpy(), other.to_local().float().asnumpy())
    for key in ("exp_avg", "exp_avg_sq", "fp32_params"):
        for one, other in zip(getattr(native, key), getattr(optimizer, key), strict=True):
            assert np.array_equal(one.asnumpy(), other.asnumpy())
    report = optimizer.swap_report()
    assert report.states[0].shape == (33, 17)
    assert report.idle_device_bytes == kit.device_bytes(optimizer) == 0
    shard = optimizer.parameters[3].to_local()
    with ms._no_grad():
        shard.copy_(Tensor(np.zeros(shard.shape, np.float32)).astype(shard.dtype))
    with pytest.warns(RuntimeWarning, match=r"^1 model parameters \(layer3"):
        optimizer(given)  # whose samples meet it


def test_a_shard_that_is_replaced_is_watched(kit, latest, monkeypatch) -> None:
    """By its own address: a DTensor's is another."""
    compat = sys.modules["mindformers.pynative.dtensor_compat"]
    monkeypatch.setattr(compat, "DTensor", DTensor)
    optimizer: Any = kit.make_adamw(latest, lambda params: list(map(sharded, params)))
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=HostDevice(poison=True))
    given = kit.gradients(kit.parameters(), 0)
    optimizer(given)
    param = optimizer.parameters[0]
    values = param._local_tensor.float().asnumpy().copy()
    values[-1, -1] += 1.0  # which no sample of the next update meets
    param._local_tensor = Tensor(values).astype(param.dtype)
    with pytest.warns(RuntimeWarning, match=r"^1 model parameters \(layer0"):
        optimizer(given)


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_all_that_is_computed_is_computed_on_shards(
    kit, latest, monkeypatch, masters, fused
) -> None:
    """Inside SkipDTensorDispatch, as natively."""
    optimizer: Any = kit.make_adamw(latest, enable_fused_opt=fused)
    config = SwapOptimizerConfig(min_numel=0, include_master_params=masters)
    swap_optimizer(optimizer, config, device=HostDevice(poison=True))
    depth = [0]

    class Skip:
        def __enter__(self) -> None:
            depth[0] += 1

        def __exit__(self, *given: object) -> None:
            depth[0] -= 1

    found = []

    def watch(name: str) -> None:
        native = getattr(latest, name)

        def watched(*given: Any) -> Any:
            found.append((name, depth[0]))
            return native(*given)

        monkeypatch.setattr(latest, name, watched)

    monkeypatch.setattr(latest, "SkipDTensorDispatch", Skip)
    update = "_run_fused_adamw_opt" if fused else "_run_adamw_opt"
    watch(update)
    watch("inplace_copy")
    optimizer(kit.gradients(optimizer.parameters, 0))
    assert {depth for _, depth in found} == {1}
    names = [name for name, _ in found]
    assert names.count(update) == 6
    assert names.count("inplace_copy") >= 6  # the parameters, from their masters
    assert depth == [0]


def test_a_gradient_of_the_global_shape_is_refused(kit, latest) -> None:
    optimizer: Any = kit.make_adamw(latest, lambda params: list(map(sharded, params)))
    swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0), device=HostDevice(poison=True))
    whole = tuple(Tensor(np.zeros(p.shape, np.float32)) for p in optimizer.parameters)
    with pytest.raises(ValueError, match=r"shape \(66, 17\), but the parameter has \(33, 17\)"):
        optimizer(whole)
