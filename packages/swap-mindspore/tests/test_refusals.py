# SPDX-License-Identifier: Apache-2.0
"""What is refused, when, with which words, and that nothing has changed then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, mint, nn

from swap_core import (
    AlreadyWrappedError,
    UnknownStateKeyError,
    UnsupportedOptimizerError,
    UnsupportedOptionError,
)
from swap_mindspore import HostDevice, SwapOptimizerConfig, is_swap_optimizer, swap_optimizer


def refuse(optimizer: Any, error: type[Exception], words: str, **config: Any) -> None:
    """Wrapping raises, and leaves the optimizer as it was."""
    kind = type(optimizer)
    with pytest.raises(error, match=words):
        swap_optimizer(optimizer, SwapOptimizerConfig(**config), device=HostDevice())
    assert type(optimizer) is kind
    assert not is_swap_optimizer(optimizer)


@pytest.mark.parametrize("make", [nn.Adam, nn.AdamWeightDecay])
@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"packed_swap": True}, UnsupportedOptionError, "packed_swap=True.*state by state"),
        ({"include_master_params": True}, UnsupportedOptionError, "MindFormers AdamW"),
        ({"allow_closure": True}, UnsupportedOptionError, "allow_closure=True is for torch"),
        ({"prefetch": "backward"}, UnsupportedOptionError, "prefetch='backward' is for torch"),
        ({"device_budget": 0.5}, UnsupportedOptionError, "device_budget=0.5 is for torch"),
        ({"state_keys": ["max_exp_avg_sq"]}, UnknownStateKeyError, "It has: exp_avg, exp_avg_sq"),
        ({"state_keys": ["moment1"]}, UnknownStateKeyError, "'moment1'"),
    ],
)
def test_configs(kit, make, config, error, words) -> None:
    optimizer = make(kit.parameters())
    before = kit.bits_of(optimizer)
    refuse(optimizer, error, words, **config)
    assert kit.bits_of(optimizer) == before
    optimizer(kit.gradients(optimizer.parameters, 0))


@pytest.mark.parametrize("option", ["use_lazy", "use_offload"])
def test_options_of_adam(kit, option) -> None:
    refuse(nn.Adam(kit.parameters(), **{option: True}), UnsupportedOptionError, f"{option}=True")


@pytest.mark.parametrize("make", [nn.Adam, nn.AdamWeightDecay])
def test_a_parallel_optimizer(kit, make) -> None:
    optimizer = make(kit.parameters())
    optimizer.use_parallel = True  # MindSpore sets it on Ascend only
    refuse(optimizer, UnsupportedOptionError, "use_parallel")


def test_an_update_moved_to_the_host_on_a_card(kit, monkeypatch) -> None:
    optimizer = nn.Adam(kit.parameters())
    from swap_mindspore import optimizer as module

    context = {"mode": ms.PYNATIVE_MODE, "device_target": "Ascend"}
    monkeypatch.setattr(module, "ms", SimpleNamespace(get_context=context.get))
    with pytest.raises(UnsupportedOptionError, match=r"optimizer\.target='CPU'"):
        swap_optimizer(optimizer)


class OwnUpdate(nn.Adam):
    def construct(self, gradients: Any) -> Any:
        return gradients


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda ps: mint.optim.AdamW(ps), "mindspore.mint.optim.adamw.AdamW"),
        (lambda ps: nn.SGD(ps), "mindspore.nn.optim.sgd.SGD"),
        (lambda ps: nn.AdamOffload(ps), "mindspore.nn.optim.adam.AdamOffload"),
        (lambda ps: OwnUpdate(ps), "OwnUpdate"),
        (lambda ps: nn.Dense(2, 2), "Dense"),
    ],
)
def test_other_optimizers_by_name(kit, make, name) -> None:
    words = f"{name}, which is not supported.*mindspore.nn.Adam, mindspore.nn.AdamWeightDecay"
    refuse(make(kit.parameters()), UnsupportedOptimizerError, words)


def test_wrapping_twice(kit) -> None:
    optimizer = kit.make_twins(nn.Adam).swapped
    with pytest.raises(AlreadyWrappedError, match="swaps already"):
        swap_optimizer(optimizer)
    assert is_swap_optimizer(optimizer)


def test_a_config_that_is_none(kit) -> None:
    with pytest.raises(ValueError, match="give a SwapOptimizerConfig"):
        swap_optimizer(nn.Adam(kit.parameters()), {"swap_times": 3})  # type: ignore[arg-type]


def test_on_the_cpu_nothing_swaps_and_one_warning_says_so(kit) -> None:
    optimizer = nn.Adam(kit.parameters())
    with pytest.warns(UserWarning, match="is on the CPU") as warned:
        swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=0))
    assert len(warned) == 1
    native = nn.Adam(kit.parameters())
    for each in (optimizer, native):
        each(kit.gradients(each.parameters, 0))
    assert kit.bits_of(optimizer) == kit.bits_of(native)
    assert optimizer.swap_report().resident_bytes == sum(s.nbytes for s in kit.states_of(native))


# Calls.


@pytest.mark.parametrize("make", [nn.Adam, nn.AdamWeightDecay])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda given: given[:-1], ValueError, "6 parameters and got 5 gradients"),
        (lambda given: (*given, given[0]), ValueError, "got 7 gradients"),
        (lambda given: given[0], ValueError, "got a Tensor"),
        (lambda given: (*given[:3], None, *given[4:]), ValueError, r"3 \(layer3.beta\) is None"),
        (lambda given: (given[1], *given[1:]), ValueError, r"shape \(5,\).*\(33, 17\)"),
        (lambda given: (1.0, *given[1:]), TypeError, "is a float; only dense"),
        (
            lambda given: (
                ms.COOTensor(Tensor([[0, 0]], ms.int32), Tensor([1.0], ms.float32), (33, 17)),
                *given[1:],
            ),
            TypeError,
            "is a COOTensor; only dense",
        ),
    ],
)
def test_gradients_that_do_not_fit_change_nothing(kit, make, change, error, words) -> None:
    pair = kit.make_twins(make)
    pair.step(1)
    before = kit.bits_of(pair.swapped)
    with pytest.raises(error, match=words):
        pair.swapped(change(kit.gradients(pair.swapped.parameters, 7)))
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)


def test_gradients_of_a_dtype_that_native_refuses(kit) -> None:
    pair = kit.make_twins(lambda ps: nn.Adam(ps, weight_decay=0.1))
    halves = tuple(g.astype(ms.float16) for g in kit.gradients(pair.swapped.parameters, 0))
    with pytest.raises(TypeError, match="Cast the gradient"):
        pair.swapped(halves)
    assert pair.swapped.global_step.asnumpy()[0] == 0
    pair.step(1)


def test_a_list_of_gradients_is_taken(kit) -> None:
    pair = kit.make_twins(nn.Adam)
    pair.native(kit.gradients(pair.native.parameters, 0))
    pair.swapped(list(kit.gradients(pair.swapped.parameters, 0)))
    pair.check()


# Graph mode.

COMPILED = r"method or function '.*\.swapped_optimizers_cannot_be_compiled' is not supported"


class Caller(nn.Cell):
    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, given: Any) -> Any:
        return self.optimizer(given)


def test_graph_mode_is_refused_at_wrapping(kit) -> None:
    optimizer = nn.Adam(kit.parameters())
    ms.set_context(mode=ms.GRAPH_MODE)
    refuse(optimizer, UnsupportedOptionError, "graph mode is not supported")


def test_graph_mode_is_refused_at_a_call(kit) -> None:
    pair = kit.make_twins(nn.Adam)
    before = kit.bits_of(pair.swapped)
    given = kit.gradients(pair.swapped.parameters, 0)
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(RuntimeError, match="called in graph mode"):
        pair.swapped(given)
    with pytest.raises(RuntimeError, match=COMPILED):
        Caller(pair.swapped)(given)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)


def test_jit_is_refused_at_a_call(kit) -> None:
    pair = kit.make_twins(nn.Adam)
    before = kit.bits_of(pair.swapped)

    @ms.jit
    def compiled(given: Any) -> Any:
        return pair.swapped(given)

    with pytest.raises(RuntimeError, match=COMPILED):
        compiled(kit.gradients(pair.swapped.parameters, 0))
    assert kit.bits_of(pair.swapped) == before
    pair.step(1)
