# SPDX-License-Identifier: Apache-2.0
"""What is refused, with which words, and that nothing has changed then."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import swap_mindformers
import swap_mindspore
from swap_core import (
    AlreadyWrappedError,
    UnknownStateKeyError,
    UnsupportedOptimizerError,
    UnsupportedOptionError,
)
from swap_mindformers import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer
from swap_mindspore import HostDevice


def refuse(optimizer: Any, error: type[Exception], words: str, **config: Any) -> None:
    kind = type(optimizer)
    with pytest.raises(error, match=words):
        swap_optimizer(optimizer, SwapOptimizerConfig(**config), device=HostDevice())
    assert type(optimizer) is kind
    assert not is_swap_optimizer(optimizer)


def test_both_entrances_lead_to_the_adapter(kit, release) -> None:
    assert swap_mindformers.swap_optimizer is swap_mindspore.swap_optimizer
    optimizer = kit.make_adamw(release)
    config = SwapOptimizerConfig(min_numel=0)
    assert swap_mindspore.swap_optimizer(optimizer, config, device=HostDevice()) is optimizer
    assert isinstance(optimizer, release.AdamW)
    assert isinstance(optimizer, nn.Optimizer)
    assert type(optimizer).__name__ == "AdamW"
    assert "swapped: packed" in repr(optimizer)
    refusal = pytest.raises(AlreadyWrappedError)
    with refusal:
        swap_optimizer(optimizer)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (
            {"state_keys": ["master_param"]},
            UnsupportedOptionError,
            "'master_param', which needs include_master_params=True",
        ),
        (
            {"state_keys": ["exp_avg"], "include_master_params": True},
            UnsupportedOptionError,
            "leaves 'master_param' out",
        ),
        ({"state_keys": ["max_exp_avg_sq"]}, UnknownStateKeyError, "It has: exp_avg, exp_avg_sq"),
        ({"state_keys": ["momentum"]}, UnknownStateKeyError, "'momentum'"),
        ({"allow_closure": True}, UnsupportedOptionError, "allow_closure=True is for torch"),
    ],
)
def test_configs(kit, latest, config, error, words) -> None:
    optimizer = kit.make_adamw(latest)
    before = kit.bits_of(optimizer)
    refuse(optimizer, error, words, **config)
    assert kit.bits_of(optimizer) == before
    optimizer(kit.gradients(optimizer.parameters, 0))


def test_master_param_named_where_there_is_none(kit, latest) -> None:
    config = {"state_keys": ["master_param"], "include_master_params": True}
    refuse(kit.make_adamw(latest, dtypes=kit.FP32), UnknownStateKeyError, "does not have", **config)


@pytest.mark.parametrize("option", ["enable_cpu_offload", "use_parallel"])
def test_options(kit, latest, option) -> None:
    optimizer = kit.make_adamw(latest)
    setattr(optimizer, option, True)  # the class itself refuses the first
    refuse(optimizer, UnsupportedOptionError, option)


def test_graph_mode(kit, latest) -> None:
    optimizer = kit.make_adamw(latest)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        refuse(optimizer, UnsupportedOptionError, "graph mode")
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def test_a_class_that_updates_in_another_way(kit, latest) -> None:
    class Own(latest.AdamW):
        def construct(self, gradients: Any) -> Any:
            return gradients

    refuse(Own(kit.parameters()), UnsupportedOptimizerError, "is a .*Own, which is not supported")


def test_another_adamw_of_the_same_name() -> None:
    class AdamW(nn.Optimizer):
        pass

    AdamW.__qualname__ = "AdamW"  # as at the top of a module
    params = [Parameter(Tensor(np.zeros(3, np.float32)), name="w")]
    words = "is a .*AdamW, which is not supported.*mindformers.pynative.optimizer.adamw"
    refuse(AdamW(0.1, params), UnsupportedOptimizerError, words)


NEEDED = (
    *("_parameters", "fp32_params", "_is_low_precision_param", "exp_avg", "exp_avg_sq"),
    *("optim_filter", "max_exp_avg_sq", "fused_adamw_opt", "enable_fused_opt", "amsgrad"),
    *("enable_cpu_offload", "maximize", "beta1", "beta2", "eps", "beta1_value", "beta2_value"),
    *("eps_value", "one_minus_beta2", "global_step", "is_group", "is_group_lr"),
)


@pytest.mark.parametrize("name", NEEDED)
def test_a_release_without_an_attribute(kit, latest, name) -> None:
    optimizer = kit.make_adamw(latest)
    delattr(optimizer, name)
    words = rf"the optimizer has no '{name}'.*Known to work: MindFormers 2\.0\.0 and 2\.1\.0"
    refuse(optimizer, UnsupportedOptimizerError, words)


@pytest.mark.parametrize("name", ["_increase_global_step", "reload_main_params_from_model"])
def test_a_release_without_a_method(kit, latest, monkeypatch, name) -> None:
    optimizer = kit.make_adamw(latest)
    (owner,) = [base for base in latest.AdamW.__mro__ if name in vars(base)]
    monkeypatch.delattr(owner, name)
    refuse(optimizer, UnsupportedOptimizerError, f"the optimizer has no '{name}'")


@pytest.mark.parametrize(
    ("name", "other", "found"),
    [
        ("_run_adamw_opt", lambda param, grad: None, "param, grad"),
        ("inplace_copy", lambda src, dst: None, "src, dst"),  # as many, in another order
        ("_run_fused_adamw_opt", lambda *given: None, "given"),
    ],
)
def test_a_release_with_other_functions(kit, latest, monkeypatch, name, other, found) -> None:
    optimizer = kit.make_adamw(latest)
    monkeypatch.setattr(latest, name, other)
    words = rf"'{name}' takes \({found}\) and not \("
    refuse(optimizer, UnsupportedOptimizerError, words)


@pytest.mark.parametrize(
    "name",
    ["_run_adamw_opt", "_run_fused_adamw_opt", "inplace_copy", "op_cast", "SkipDTensorDispatch"],
)
def test_a_release_without_a_function(kit, latest, monkeypatch, name) -> None:
    optimizer = kit.make_adamw(latest)
    monkeypatch.delattr(latest, name)
    refuse(optimizer, UnsupportedOptimizerError, f"its module has no '{name}'")


def test_all_that_is_missing_is_named_at_once(kit, latest, monkeypatch) -> None:
    optimizer = kit.make_adamw(latest)
    del optimizer.exp_avg, optimizer.eps
    monkeypatch.delattr(latest, "op_cast")
    words = "no 'exp_avg'; the optimizer has no 'eps'; its module has no 'op_cast'"
    refuse(optimizer, UnsupportedOptimizerError, words)


@pytest.mark.parametrize("count", [5, 7])
def test_a_release_whose_states_are_not_one_for_each_parameter(kit, latest, count) -> None:
    optimizer = kit.make_adamw(latest)
    optimizer.optim_filter = (True,) * count
    words = f"'optim_filter' has {count} entries for 6 parameters"
    refuse(optimizer, UnsupportedOptimizerError, words)


def test_the_version_that_is_installed_is_named(kit, latest, monkeypatch) -> None:
    from swap_mindformers import structure

    monkeypatch.setattr(structure, "version", lambda name: "9.9.9")
    optimizer = kit.make_adamw(latest)
    delattr(optimizer, "exp_avg")
    refuse(optimizer, UnsupportedOptimizerError, r"\(MindFormers 9\.9\.9\) is not built as")


def test_a_version_that_nobody_knows(kit, latest, monkeypatch) -> None:
    from swap_mindformers import structure

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(structure, "version", missing)
    optimizer = kit.make_adamw(latest)
    delattr(optimizer, "exp_avg")
    refuse(optimizer, UnsupportedOptimizerError, r"\(MindFormers of unknown version\) is not built")


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda given: given[:-1], ValueError, "6 parameters and got 5 gradients"),
        (lambda given: (*given[:-1], None), ValueError, r"layer5\.weight\) is None"),
        (lambda given: (given[1], *given[1:]), ValueError, "has shape"),
        (lambda given: (SimpleNamespace(), *given[1:]), TypeError, "only dense Tensors"),
    ],
)
def test_gradients_are_checked_before_anything_changes(kit, latest, spoil, error, words) -> None:
    pair = kit.make_twins(latest, include_master_params=True)
    before = kit.bits_of(pair.swapped)
    given = kit.gradients(pair.swapped.parameters, 0)
    with pytest.raises(error, match=words):
        pair.swapped(spoil(given))
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)
