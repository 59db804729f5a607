# SPDX-License-Identifier: Apache-2.0
"""Saving and loading in every way that MindSpore has, interchangeable with the native optimizer.

A native optimizer that has been called ignores what ``set_data`` and ``load_param_into_net`` do to
its Parameters (MindSpore 2.10, CPU): its compiled graph goes on with the tensors that it knows. A
swapped one uses what was loaded. So the oracle here is always a native optimizer that was not
called before it was loaded.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

MAKERS = {
    "Adam, amsgrad": lambda ps: nn.Adam(ps, 0.01, use_amsgrad=True),
    "AdamWeightDecay": lambda ps: nn.AdamWeightDecay(ps, 0.01, weight_decay=0.1),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
formats = pytest.mark.parametrize("kind", ["ckpt", "safetensors"])


class Holder(nn.Cell):
    """A Cell that holds an optimizer, as TrainOneStepCell does."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer


def trained(kit, make, steps: int = 2):
    pair = kit.make_twins(make)
    pair.step(steps)
    return pair


def values_in(path: str, kind: str) -> dict[str, bytes]:
    loaded = ms.load_checkpoint(path, format=kind)
    return {name: value.asnumpy().tobytes() for name, value in loaded.items()}


def with_types(optimizer, kit) -> dict[str, bytes]:
    return {name: data for name, (_, data) in kit.bits_of(optimizer).items()}


@formats
@makers
@pytest.mark.parametrize("hold", [lambda optimizer: optimizer, Holder], ids=["itself", "held"])
def test_files_are_those_of_native(kit, tmp_path, make, kind, hold) -> None:
    pair = trained(kit, make)
    paths = [str(tmp_path / f"{name}.{kind}") for name in ("native", "swapped")]
    for optimizer, path in zip((pair.native, pair.swapped), paths, strict=True):
        ms.save_checkpoint(hold(optimizer), path, format=kind)
    native, swapped = (values_in(path, kind) for path in paths)
    assert swapped == native == with_types(pair.native, kit)
    assert list(swapped) == list(native)
    assert kit.device_bytes(pair.swapped) == 0


@makers
@pytest.mark.parametrize(("kind", "strict"), [("ckpt", True), ("safetensors", False)])
@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "trained"])
def test_resume_equals_the_uninterrupted_run(kit, tmp_path, make, kind, strict, before) -> None:
    """Swapped to swapped and swapped to native, both as if never interrupted."""
    pair = trained(kit, make)
    path = str(tmp_path / f"state.{kind}")
    ms.save_checkpoint(pair.swapped, path, format=kind)
    again = kit.make_twins(make)
    for step in range(before):
        again.swapped(kit.gradients(again.swapped.parameters, 50 + step))
    for optimizer in (again.native, again.swapped):
        loaded = ms.load_checkpoint(path, format=kind)
        assert ms.load_param_into_net(optimizer, loaded, strict_load=strict) == ([], [])
    again.check()
    again.steps = pair.steps
    pair.step(2)
    again.step(2)
    assert kit.bits_of(again.swapped) == kit.bits_of(pair.native)


def test_a_native_file_loads_into_a_swapped_optimizer(kit, tmp_path) -> None:
    make = MAKERS["Adam, amsgrad"]
    pair = trained(kit, make)
    path = str(tmp_path / "native.ckpt")
    ms.save_checkpoint(pair.native, path)
    again = kit.make_twins(make)
    ms.load_checkpoint(path, again.swapped)
    assert kit.bits_of(again.swapped) == kit.bits_of(pair.native)


def test_loading_reuses_slots_and_leaves_the_caller_its_values(kit) -> None:
    pair = trained(kit, nn.Adam)
    again = kit.make_twins(nn.Adam).swapped
    table = again._swap._table._swapped
    hosts = [s.host.data_ptr() for states in table.values() for s in states]
    given = {
        p.name: Parameter(p.asnumpy().copy(), name=p.name) for p in pair.native.get_parameters()
    }
    kept = {name: value.asnumpy().tobytes() for name, value in given.items()}
    ms.load_param_into_net(again, given)
    assert again.swap_report().idle_device_bytes == 0  # takes what was loaded to the host
    again(kit.gradients(again.parameters, 2))
    # Counters and parameters alias the caller's, as natively; states must not.
    states = [name for name in given if "moment" in name]
    assert len(states) == 12
    for name in states:
        assert given[name].asnumpy().tobytes() == kept[name]
        assert given[name].untyped_storage().nbytes() == len(kept[name])
    shown = [s.param.data_ptr() for states in table.values() for s in states]
    assert shown == hosts
    # And the other way: what the caller does to the dictionary later is not seen.
    before = kit.bits_of(again)["moment1.layer0.weight"]
    given["moment1.layer0.weight"].set_data(Tensor(np.ones((33, 17), np.float32)))
    given["moment2.layer0.weight"].copy_(Tensor(np.ones((33, 17), np.float32)))
    assert kit.bits_of(again)["moment1.layer0.weight"] == before


@makers
@pytest.mark.parametrize("hold", [lambda optimizer: optimizer, Holder], ids=["itself", "held"])
def test_state_dict_there_and_back(kit, make, hold) -> None:
    pair = trained(kit, make)
    native, swapped = hold(pair.native), hold(pair.swapped)
    state = {name: value.asnumpy().copy() for name, value in swapped.state_dict().items()}
    assert list(state) == list(native.state_dict())
    for name, value in native.state_dict().items():
        assert state[name].tobytes() == value.asnumpy().tobytes()
    again = kit.make_twins(make)
    given = {name: Tensor(value) for name, value in state.items()}
    result = hold(again.swapped).load_state_dict(given, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    hold(again.native).load_state_dict(given, strict=False)
    again.check()
    again.steps = pair.steps
    pair.step(1)
    again.step(1)
    assert kit.bits_of(again.swapped) == kit.bits_of(pair.native)


def test_state_dicts_that_do_not_fit_are_named(kit) -> None:
    pair = trained(kit, nn.Adam)
    state = dict(pair.swapped.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"moment3.w"'):
        pair.swapped.load_state_dict({**state, "moment3.w": state["moment1.layer0.weight"]})
    del state["moment1.layer0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"moment1.layer0.weight"'):
        pair.swapped.load_state_dict(state)
    pair.step(1)


def copy_in_place(param: Parameter, value: Tensor) -> None:
    param.copy_(value)


def assign(param: Parameter, value: Tensor) -> None:
    ms.ops.assign(param, value)


@pytest.mark.parametrize("edit", [copy_in_place, assign])
@makers
def test_a_state_that_is_edited_between_updates_is_used(kit, make, edit) -> None:
    pair = trained(kit, make)
    for optimizer in (pair.native, pair.swapped):
        for number, state in enumerate(kit.states_of(optimizer)):
            edit(state, Tensor(np.full(state.shape, 0.5 + number, np.float32)))
    pair.check()
    pair.step(2)


@makers
def test_a_state_that_is_replaced_between_updates_is_used(kit, make) -> None:
    pair = trained(kit, make)
    native = pair.native.get_parameters()
    fresh = make(kit.parameters())
    given = {p.name: Parameter(p.asnumpy().copy(), name=p.name) for p in native}
    ms.load_param_into_net(fresh, given)
    pair.native = fresh
    pair.check()
    for optimizer in (pair.native, pair.swapped):
        for number, state in enumerate(kit.states_of(optimizer)):
            state.set_data(Tensor(np.full(state.shape, 0.5 + number, np.float32)))
    pair.step(2)


def test_a_replacement_of_another_dtype_is_refused_before_anything_changes(kit) -> None:
    pair = trained(kit, nn.Adam)
    state = pair.swapped.moment1[0]
    kept = Tensor(state.asnumpy().copy())
    before = kit.bits_of(pair.swapped)
    state.data = Tensor(np.ones(state.shape, np.float16))
    if state.dtype == ms.float32:
        pytest.fail("MindSpore converted the value; there is nothing to refuse")
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 \(layer0.weight\) was replaced"):
        pair.swapped(kit.gradients(pair.swapped.parameters, pair.steps))
    state.data = kept
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)


def test_loading_another_dtype_casts_as_native(kit) -> None:
    pair = kit.make_twins(nn.Adam)
    values = trained(kit, nn.Adam).native.get_parameters()
    given = {
        p.name: Parameter(p.asnumpy().astype(np.float16), name=p.name)
        for p in values
        if "moment" in p.name
    }
    for optimizer in (pair.native, pair.swapped):
        ms.load_param_into_net(optimizer, given)
    pair.check()
    pair.step(1)
