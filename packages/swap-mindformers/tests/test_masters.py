# SPDX-License-Identifier: Apache-2.0
"""Master parameters: when the model gets their values, and what loading weights does to them."""

from __future__ import annotations

import sys
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

masters_in_and_out = pytest.mark.parametrize("masters", [True, False], ids=["in", "out"])


class Net(nn.Cell):
    """What is loaded into."""

    def __init__(self, params) -> None:
        super().__init__()
        for number, param in enumerate(params):
            setattr(self, f"p{number}", param)


def other_weights(params) -> dict[str, Parameter]:
    """Weights of a checkpoint."""
    values = np.random.default_rng(7)
    return {
        p.name: Parameter(
            Tensor(values.standard_normal(p.shape).astype(np.float32)).astype(p.dtype), name=p.name
        )
        for p in params
    }


def load(optimizer, how: str) -> None:
    """Put other weights into the model alone."""
    weights = other_weights(optimizer.parameters)
    if how == "load":
        ms.load_param_into_net(Net(optimizer.parameters), weights)
    for param in optimizer.parameters:
        if how == "set_data":
            param.set_data(weights[param.name])
        elif how == "in place":
            with ms._no_grad():
                param.copy_(weights[param.name])


@pytest.mark.parametrize("packed", [True, False])
def test_each_batch_rounds_its_masters_before_they_leave(kit, latest, packed) -> None:
    pair = kit.make_twins(latest, include_master_params=True, packed_swap=packed)
    masters = pair.swapped._swap.adapter._masters
    synced, native = [], masters.sync
    hosts = {state.host.data_ptr() for state in kit.tables(pair.swapped)}
    staged = []

    def sync(model_param, master, index) -> None:
        synced.append(index)
        # By address: MindSpore 2.8 remembers each storage that it is asked for.
        staged.append(master.data_ptr() not in {0, *hosts})
        native(model_param, master, index)

    masters.sync = sync
    pair.step(1)
    assert synced == list(range(6))
    assert all(staged)


def test_masters_that_stay_are_rounded_once_at_the_end(kit, latest) -> None:
    pair = kit.make_twins(latest)
    adapter = pair.swapped._swap.adapter
    order = []
    update, sync = adapter.update, adapter._masters.sync
    adapter.update = lambda step, member: (order.append("update"), update(step, member))
    adapter._masters.sync = lambda *given: (order.append("sync"), sync(*given))
    pair.step(1)
    assert order == ["update"] * 6 + ["sync"] * 6


@masters_in_and_out
@pytest.mark.parametrize("how", ["load", "set_data", "in place"])
def test_loaded_weights_are_kept_when_the_masters_are_reloaded(kit, release, masters, how) -> None:
    pair = kit.make_twins(release, include_master_params=masters)
    pair.step(1)
    for optimizer in (pair.native, pair.swapped):
        load(optimizer, how)
        optimizer.reload_main_params_from_model()
    weights = other_weights(pair.swapped.parameters)
    for param, master in zip(pair.swapped.parameters, pair.swapped.fp32_params, strict=True):
        assert np.array_equal(weights[param.name].float().asnumpy(), master.asnumpy())
    pair.check()
    pair.step(2)  # without a warning


@masters_in_and_out
@pytest.mark.parametrize("how", ["load", "set_data", "in place"])
def test_loaded_weights_are_never_reverted_in_silence(kit, latest, masters, how) -> None:
    pair = kit.make_twins(latest, include_master_params=masters)
    pair.step(1)
    for optimizer in (pair.native, pair.swapped):
        load(optimizer, how)
    words = r"^6 model parameters \(layer0\.weight, …\).*reload_main_params_from_model\(\)"
    with pytest.warns(RuntimeWarning, match=words):
        pair.step(1)  # and does what native does
    pair.step(1)  # said once


def test_one_weight_that_is_replaced_is_told_by_name(kit, latest) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    param = pair.swapped.parameters[4]
    values = param.float().asnumpy().copy()
    values[3] += 1.0  # one element of one parameter
    param.set_data(Tensor(values).astype(param.dtype))
    with pytest.warns(RuntimeWarning, match=r"^1 model parameters \(layer4\.weight"):
        pair.swapped(kit.gradients(pair.swapped.parameters, 0))


def test_weights_that_are_replaced_by_the_same_are_no_reason_to_warn(kit, latest) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    pair.step(1)
    for optimizer in (pair.native, pair.swapped):
        for param in optimizer.parameters:
            param.set_data(Tensor(param.float().asnumpy()).astype(param.dtype))
    pair.step(1)


def test_replaced_weights_are_compared_once_and_then_only_samples(kit, latest) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    masters = pair.swapped._swap.adapter._masters
    compared, differs = [], masters._differs

    def counting(optimizer, index, **options) -> bool:
        compared.append((index, options.get("sample", False)))
        return differs(optimizer, index, **options)

    masters._differs = counting
    for param in pair.swapped.parameters:
        param.set_data(Tensor(param.float().asnumpy()).astype(param.dtype))
    pair.step(1)
    assert compared == [(index, False) for index in range(6)]
    compared.clear()
    pair.step(3)  # other parameters each time
    assert compared == [(index % 6, True) for index in range(4, 16)]


def test_samples_move_on_inside_a_parameter(kit, latest) -> None:
    """A write that is no larger than a sample is seen when the samples meet it, not before."""
    pair = kit.make_twins(latest, include_master_params=True)
    param = pair.swapped.parameters[3]
    told = []
    for step in range(8):
        values = param.float().asnumpy().copy()
        values.reshape(-1)[6 * 64 : 7 * 64] += 1.0
        with ms._no_grad():
            param.copy_(Tensor(values).astype(param.dtype))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair.swapped(kit.gradients(pair.swapped.parameters, step))
        told.append(["layer3.weight" in str(warning.message) for warning in caught])
    assert told == [[True] if step == 5 else [] for step in range(8)]


def test_weights_that_are_no_numbers_are_no_reason_to_warn(kit, latest) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    lost = [Tensor(np.full(p.shape, np.nan, np.float32)) for p in pair.swapped.parameters]
    pair.swapped(tuple(lost))
    assert np.isnan(pair.swapped.parameters[0].float().asnumpy()).all()
    pair.swapped(kit.gradients(pair.swapped.parameters, 1))


@masters_in_and_out
def test_a_snapshot_tells_which_masters_to_reload(kit, latest, masters) -> None:
    """As MindFormers' trainer does: snapshot, load model and some of the states, reload."""
    if "save_main_params_snapshot" not in dir(latest.AdamW):
        pytest.fail("the last release must be one with snapshots: give 2.1.0 last")
    pair = kit.make_twins(latest, include_master_params=masters)
    pair.step(1)
    for optimizer in (pair.native, pair.swapped):
        optimizer.save_main_params_snapshot()
        load(optimizer, "load")
        values = Tensor(np.full(optimizer.fp32_params[0].shape, 0.125, np.float32))
        optimizer.fp32_params[0].set_data(values)  # as loaders do
        optimizer.reload_main_params_from_model()
    pair.check()
    assert (pair.swapped.fp32_params[0].asnumpy() == 0.125).all()  # kept: it was loaded
    weights = other_weights(pair.swapped.parameters)
    second = weights[pair.swapped.parameters[1].name].float().asnumpy()
    assert np.array_equal(pair.swapped.fp32_params[1].asnumpy(), second)  # reloaded
    with pytest.warns(RuntimeWarning, match=r"^1 model parameters \(layer0"):
        pair.step(1)  # the first weight and its master were loaded with different values
    pair.step(1)


def test_a_snapshot_borrows_the_masters_too(kit, latest, monkeypatch) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    hosts = [s.host.data_ptr() for s in kit.tables(pair.swapped) if s.slot.key == "master_param"]
    seen = []
    value = Parameter.value
    monkeypatch.setattr(
        Parameter, "value", lambda param: (seen.append(param.data_ptr()), value(param))[1]
    )
    pair.swapped.save_main_params_snapshot()
    assert len(seen) == 6
    assert not set(seen) & set(hosts)


def test_borrowed_masters_are_on_the_device_and_go_back(kit, latest, monkeypatch) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    kind = latest.AdamW.__mro__[1]  # MainParamsMixin, whose module copies
    seen = []

    def peek(*given) -> None:
        seen.extend(m.data_ptr() for m in pair.swapped.fp32_params)
        raise ValueError("stopped")

    hosts = [s.host.data_ptr() for s in kit.tables(pair.swapped) if s.slot.key == "master_param"]
    assert hosts == [m.data_ptr() for m in pair.swapped.fp32_params]
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[kind.__module__], "inplace_copy", peek)
        with pytest.raises(ValueError, match="stopped"):
            pair.swapped.reload_main_params_from_model()
    assert len(seen) == 6
    assert not set(seen) & set(hosts)
    assert hosts == [m.data_ptr() for m in pair.swapped.fp32_params]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step(1)
