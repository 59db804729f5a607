# SPDX-License-Identifier: Apache-2.0
"""Containers on small models: what they wrap, and that their state dicts are torchtitan's own."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from _small import OnTheCpu, bits, parts, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from swap_core import UnsupportedOptimizerError, UnsupportedOptionError
from swap_testkit.torch import assert_same_bits
from swap_torch import is_swap_optimizer
from swap_torch.integrations.torchtitan import SwapOptimizersContainer, swap_config, swap_container
from swap_torch.integrations.torchtitan.container import _made

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*swap_optimizer"),
]


def groups():
    rest = {"lr": 0.01, "weight_decay": 0.1}
    return [
        ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=rest),
    ]


def built(container, model_parts, **options):
    config = container.Config(param_groups=groups(), implementation="for-loop", **options)
    return config.build(model_parts=model_parts)


def native_and_swapped(steps=3, **options):
    """Both trained, with their model parts."""
    made = []
    for container in (OptimizersContainer, OnTheCpu):
        more = {"swap_optimizer": True, "swap_optimizer_min_numel": 0, **options}
        model_parts = parts()
        optimizers = built(container, model_parts, **(more if container is OnTheCpu else {}))
        train(optimizers, model_parts, steps)
        made.append((optimizers, model_parts))
    return made


def test_every_optimizer_of_every_part_is_wrapped():
    (native, _), (swapped, _) = native_and_swapped()
    assert len(swapped) == 4  # two kinds for each of two parts
    assert all(is_swap_optimizer(each) for each in swapped)
    assert not any(is_swap_optimizer(each) for each in native)
    for ours, theirs in zip(swapped, native, strict=True):
        assert_same_bits(theirs, ours)
        assert ours.swap_report().ledger.updates == 3
        assert ours.swap_report().ledger.host_bytes > 0


def test_options_reach_the_optimizers():
    (_, _), (swapped, _) = native_and_swapped(
        swap_optimizer_times=3, swap_optimizer_packed_swap=False, swap_optimizer_state_keys=None
    )
    assert "per tensor, swap_times=3" in repr(swapped.optimizers[0])


def test_off_is_torchtitans_own():
    model_parts = parts()
    optimizers = built(OnTheCpu, model_parts)
    assert [type(each) for each in optimizers] == [torch.optim.Adam, torch.optim.AdamW] * 2


def test_metrics_keep_their_names():
    (native, _), (swapped, _) = native_and_swapped()
    names = [
        LRSchedulersContainer(optimizers, lambda _: 1.0).get_metrics()
        for optimizers in (native, swapped)
    ]
    assert names[0] == names[1] == {"lr/Adam": 0.02, "lr/AdamW": 0.01}


@pytest.mark.parametrize("steps", [0, 2])
def test_state_dicts_are_torchtitans_own(steps):
    (native, _), (swapped, _) = native_and_swapped(steps)
    found = bits(swapped.state_dict())
    assert "state.one.weight.exp_avg_sq" in found
    assert found == bits(native.state_dict())


def test_state_dicts_there_and_back():
    (native, _), (swapped, _) = native_and_swapped(2)
    ahead = native_and_swapped(4)
    ahead[0][0].load_state_dict(swapped.state_dict())
    ahead[1][0].load_state_dict(native.state_dict())
    assert bits(ahead[0][0].state_dict()) == bits(native.state_dict())
    assert bits(ahead[1][0].state_dict()) == bits(native.state_dict())


def test_a_state_dict_does_not_change_with_training():
    model_parts = parts()
    optimizers = built(OnTheCpu, model_parts, swap_optimizer=True, swap_optimizer_min_numel=0)
    train(optimizers, model_parts, 1)
    held = optimizers.state_dict()
    before = bits(held)
    train(optimizers, model_parts, 2)
    assert bits(held) == before
    assert bits(optimizers.state_dict()) != before


# Other kinds of optimizers and containers.


class UnknownOptimizer(torch.optim.SGD):
    """One without an adapter."""

    def step(self, closure=None):
        super().step(closure)


class WithUnknown(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        if name == "Unknown":
            return UnknownOptimizer
        if name == "SparseAdam":
            return torch.optim.SparseAdam
        if name == "function of SparseAdam":
            return lambda groups: torch.optim.SparseAdam(groups, lr=0.1)
        if name == "function":
            return lambda groups: UnknownOptimizer(groups, lr=0.1)
        return OptimizersContainer._resolve_optimizer_factory(name)


def mixed(name):
    kinds = [
        ParamGroupConfig(pattern="weight", optimizer_name=name, optimizer_kwargs={"lr": 0.1}),
        groups()[1],
    ]
    return WithUnknown.Config(param_groups=kinds, implementation="for-loop")


def test_an_optimizer_without_an_adapter_is_refused_before_a_model_exists():
    config = swap_config(mixed("Unknown"))
    message = "optimizer.param_groups 'weight', which is Unknown .*UnknownOptimizer, which is not"
    with pytest.raises(UnsupportedOptimizerError, match=message):
        swap_config(config, swap_optimizer=True)


def test_one_that_only_the_container_can_make_is_refused_before_any_is_wrapped(monkeypatch):
    wrapped = []
    monkeypatch.setattr(
        "swap_torch.integrations.torchtitan.container.swap_optimizer",
        lambda optimizer, *_, **__: wrapped.append(optimizer),
    )
    config = swap_config(mixed("function"), swap_optimizer=True)
    message = (
        "this config builds UnknownOptimizer for one.weight. .*is not supported. Supported: .*"
    )
    with pytest.raises(UnsupportedOptimizerError, match=message):
        config.build(model_parts=parts()[:1])
    assert wrapped == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capturable": True}, "capturable=True"),
        ({"foreach": True}, "builds AdamW with foreach=True, .* give another --optimizer.impl"),
    ],
)
def test_options_of_one_that_only_the_container_can_make_are_refused_before_any_is_wrapped(
    options, message
):
    made = []

    class Late(WithUnknown):
        @dataclass(kw_only=True, slots=True)
        class Config(WithUnknown.Config):
            pass

        @staticmethod
        def _resolve_optimizer_factory(name):
            return lambda groups: made.append(torch.optim.AdamW(groups)) or made[-1]

    kinds = [
        ParamGroupConfig(pattern="bias", optimizer_name="one"),
        ParamGroupConfig(pattern=".*", optimizer_name="other", optimizer_kwargs=options),
    ]
    config = Late.Config(param_groups=kinds, implementation="for-loop")
    with pytest.raises(UnsupportedOptionError, match=message):
        swap_config(config, swap_optimizer=True).build(model_parts=parts()[:1])
    assert [is_swap_optimizer(each) for each in made] == [False, False]


def test_why_an_optimizer_has_no_adapter_is_said_where_it_is_known():
    with pytest.raises(UnsupportedOptimizerError, match="SparseAdam updates the rows"):
        swap_config(mixed("SparseAdam"), swap_optimizer=True)
    config = swap_config(mixed("function of SparseAdam"), swap_optimizer=True)
    with pytest.raises(UnsupportedOptimizerError, match="SparseAdam updates the rows"):
        config.build(model_parts=parts()[:1])


class ThirdParty(OptimizersContainer):
    """With a field, a check and an argument of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        note: str = ""
        seen: list[str] = field(default_factory=list)

        def __post_init__(self):
            self.seen.append("checked")

    def __init__(self, config, *, model_parts, owner=None):
        super().__init__(config, model_parts=model_parts)
        self.owner = owner


def test_a_third_partys_container():
    container = swap_container(ThirdParty)
    assert swap_container(ThirdParty) is container
    assert swap_container(container) is container
    assert issubclass(container, ThirdParty)
    assert container.__name__ == "SwapThirdParty"
    config = swap_config(ThirdParty.Config(param_groups=groups(), note="mine"))
    assert type(config) is container.Config
    assert (config.note, config.seen) == ("mine", ["checked", "checked"])
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=parts(), owner="me")
    assert optimizers.owner == "me"
    assert type(optimizers) is container


@pytest.mark.parametrize("base", [OptimizersContainer, ThirdParty])
def test_configs_can_be_copied_and_pickled(base, monkeypatch):
    native = base.Config(param_groups=groups(), implementation="for-loop")
    config = swap_config(native, swap_optimizer=True)
    config.swap_optimizer_times = 8
    for made in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (type(made), made) == (type(config), config)
    # Of a subclass of ours, by its name.
    mine = OnTheCpu.Config(param_groups=groups())
    assert type(pickle.loads(pickle.dumps(mine))) is OnTheCpu.Config
    # In a process that has not made the class yet.
    pickled = pickle.dumps(config)
    monkeypatch.delitem(_made, base)
    made = pickle.loads(pickled)
    assert type(made) is swap_container(base).Config
    assert made.to_dict() == config.to_dict()


def test_the_public_container_is_that_of_torchtitans():
    assert swap_container(OptimizersContainer) is SwapOptimizersContainer
    assert SwapOptimizersContainer.__name__ == "SwapOptimizersContainer"


def offloaded(param):
    """As FSDP2's offload policy leaves a parameter: on the CPU, of a mesh of accelerators."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    meta = TensorMeta(param.shape, param.stride(), param.dtype)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    return nn.Parameter(DTensor(param.detach(), spec, requires_grad=False))


def test_parameters_that_are_offloaded_are_refused():
    (part, _) = parts()
    part.one.weight = offloaded(part.one.weight)
    config = SwapOptimizersContainer.Config(
        param_groups=groups(), implementation="for-loop", swap_optimizer=True
    )
    with pytest.raises(UnsupportedOptionError, match=r"training.enable_cpu_offload is on, which"):
        config.build(model_parts=[part])
