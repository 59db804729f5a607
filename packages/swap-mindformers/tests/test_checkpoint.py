# SPDX-License-Identifier: Apache-2.0
"""Moments and masters to files and back, interchangeable with the native optimizer."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

formats = pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
ways = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])


class Holder(nn.Cell):
    """A Cell that holds an optimizer, as TrainOneStepCell does."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer


def trained(kit, module, **options):
    pair = kit.make_twins(module, dtypes=kit.MIXED, include_master_params=True, **options)
    pair.step(2)
    return pair


def values_in(path: str, kind: str) -> dict[str, bytes]:
    loaded = ms.load_checkpoint(path, format=kind)
    return {name: value.float().asnumpy().tobytes() for name, value in loaded.items()}


def load_all(optimizer: nn.Optimizer, path: str, kind: str) -> None:
    """The optimizer's file has the model parameters as well: natively they are its own."""
    loaded = ms.load_checkpoint(path, format=kind)
    ms.load_param_into_net(optimizer, loaded, strict_load=True)
    for param in optimizer.parameters:
        if param.name in loaded:
            param.set_data(loaded[param.name])


@formats
@pytest.mark.parametrize("hold", [lambda optimizer: optimizer, Holder], ids=["itself", "held"])
def test_files_are_those_of_native(kit, latest, tmp_path, kind, hold) -> None:
    pair = trained(kit, latest)
    paths = [str(tmp_path / f"{name}.{kind}") for name in ("native", "swapped")]
    for optimizer, path in zip((pair.native, pair.swapped), paths, strict=True):
        ms.save_checkpoint(hold(optimizer), path, format=kind)
    native, swapped = (values_in(path, kind) for path in paths)
    assert swapped == native
    assert list(swapped) == list(native)
    names = {name.partition(".")[0] for name in swapped}
    assert {"main_param", "adam_m", "adam_v", "global_step"} <= names
    assert kit.device_bytes(pair.swapped) == 0


@formats
@ways
@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "trained"])
def test_resume_equals_the_uninterrupted_run(kit, latest, tmp_path, packed, kind, before) -> None:
    """From native to swapped and from swapped to native, as if never interrupted."""
    pair = trained(kit, latest, packed_swap=packed)
    paths = [str(tmp_path / f"{name}.{kind}") for name in ("native", "swapped")]
    again = kit.make_twins(latest, dtypes=kit.MIXED, include_master_params=True, packed_swap=packed)
    for optimizer, path in zip((pair.native, pair.swapped), paths, strict=True):
        everything = [*optimizer.parameters, *optimizer.get_parameters()]
        by_name = {p.name: p for p in everything}
        ms.save_checkpoint([{"name": n, "data": p} for n, p in by_name.items()], path, format=kind)
    if before:
        again.step(before)
    for optimizer, path in zip((again.swapped, again.native), paths, strict=True):
        load_all(optimizer, path, kind)
    again.check()
    again.steps = pair.steps
    pair.step(2)
    again.step(2)
    assert kit.bits_of(again.swapped) == kit.bits_of(pair.native)


@ways
def test_a_fresh_load_reuses_slots_and_leaves_the_caller_its_values(kit, latest, packed) -> None:
    pair = trained(kit, latest, packed_swap=packed)
    again = kit.make_twins(
        latest, dtypes=kit.MIXED, include_master_params=True, packed_swap=packed
    ).swapped
    hosts = [state.host.data_ptr() for state in kit.tables(again)]
    given = {
        p.name: Parameter(Tensor(p.asnumpy().copy()), name=p.name)
        for p in pair.native.get_parameters()
        if p.name.startswith(("adam_", "main_param", "global_step"))
    }
    kept = {name: value.asnumpy().tobytes() for name, value in given.items()}
    assert ms.load_param_into_net(again, given, strict_load=True)[1] == []
    assert again.swap_report().idle_device_bytes == 0  # takes what was loaded to the host
    with pytest.warns(RuntimeWarning, match="model parameters"):
        again(kit.gradients(again.parameters, 2))  # of the model nothing was loaded
    for name, value in given.items():
        if name.startswith(("adam_", "main_param")):
            assert value.asnumpy().tobytes() == kept[name]
            assert value.untyped_storage().nbytes() == len(kept[name])
    assert [state.shown.data_ptr() for state in kit.tables(again)] == hosts


@ways
@pytest.mark.parametrize("hold", [lambda optimizer: optimizer, Holder], ids=["itself", "held"])
def test_state_dict_there_and_back(kit, latest, packed, hold) -> None:
    pair = trained(kit, latest, packed_swap=packed)
    native, swapped = hold(pair.native), hold(pair.swapped)
    state = {
        name: Tensor(v.float().asnumpy().copy()).astype(v.dtype)
        for name, v in swapped.state_dict().items()
    }
    assert list(state) == list(native.state_dict())
    for name, value in native.state_dict().items():
        assert state[name].float().asnumpy().tobytes() == value.float().asnumpy().tobytes()
    again = kit.make_twins(latest, dtypes=kit.MIXED, include_master_params=True, packed_swap=packed)
    hold(again.swapped).load_state_dict(state, strict=False)
    hold(again.native).load_state_dict(state, strict=False)
    again.check()


def test_a_file_says_nothing_of_how_it_was_made(kit, latest, tmp_path) -> None:
    """Saved packed with masters in, loaded per tensor with masters out, other batches."""
    pair = trained(kit, latest)
    path = str(tmp_path / "state.ckpt")
    by_name = {p.name: p for p in [*pair.swapped.parameters, *pair.swapped.get_parameters()]}
    ms.save_checkpoint([{"name": n, "data": p} for n, p in by_name.items()], path)
    again = kit.make_twins(latest, dtypes=kit.MIXED, packed_swap=False, swap_times=16, min_numel=40)
    for optimizer in (again.native, again.swapped):
        load_all(optimizer, path, "ckpt")
    again.check()
    again.steps = pair.steps
    pair.step(1)
    again.step(1)
    assert kit.bits_of(again.swapped) == kit.bits_of(pair.swapped)


def test_a_moment_of_another_shape_is_refused_and_nothing_is_taken_over(kit, latest) -> None:
    pair = trained(kit, latest)
    before = kit.bits_of(pair.swapped)
    pair.swapped.exp_avg[1].set_data(Tensor(np.ones((6,), np.float32)))
    with pytest.raises(ValueError, match=r"exp_avg of parameter 1.*shape \(6,\)"):
        pair.swapped(kit.gradients(pair.swapped.parameters, 2))
    pair.swapped.exp_avg[1].set_data(Tensor(pair.native.exp_avg[1].asnumpy().copy()))
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)
