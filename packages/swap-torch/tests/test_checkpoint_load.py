# SPDX-License-Identifier: Apache-2.0
"""``load_state_dict()``: into what, from what, what it refuses, and that it costs little."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from swap_core import StateDictError
from swap_testkit import Tamper
from swap_testkit.torch import CpuAsDevice, TorchRecordingDevice, assert_same_bits, same_bits
from swap_torch import SwapOptimizerConfig
from swap_torch.reading import LoadedState

SHAPES = [(3, 50), (), (40,), (7, 2), (200,)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
SOME = [True, True, False, True, True]
"""One parameter has no state yet."""


def config(packed: bool = True, **options: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(**{"min_numel": 8, "swap_times": 3, **options}, packed_swap=packed)


def copy_parameters(pair: Any, to: Any) -> None:
    for (p, q), (r, s) in zip(pair.pairs(), to.pairs(), strict=True):
        r.data.copy_(p)
        s.data.copy_(q)


def exchange(pair: Any, to: Any) -> None:
    """Each loads what the other kind saved."""
    copy_parameters(pair, to)
    # Copies, because natively load_state_dict may share the tensors that it is given.
    to.native.load_state_dict(copy.deepcopy(pair.swapped.state_dict()))
    to.swapped.load_state_dict(pair.native.state_dict())
    to.check()


# Into what.


KINDS = {
    "AdamW": (AdamW, {"lr": 0.1}),
    "Adam": (Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "AMSGrad": (AdamW, {"amsgrad": True}),
    "fused": (AdamW, {"fused": True, "betas": (0.8, 0.9)}),
    "tensor lr": (AdamW, {"lr": torch.tensor(0.1)}),
}


@BOTH
@pytest.mark.parametrize("into", ["fresh", "trained", "trained without options"])
@pytest.mark.parametrize("kind", KINDS)
def test_native_and_swapped_load_each_others_files(
    twins: Callable[..., Any], train: Callable[..., None], kind: str, into: str, packed: bool
) -> None:
    optimizer_class, options = KINDS[kind]
    pair = twins(SHAPES, optimizer_class, config=config(packed), **options)
    train(pair, 3, SOME)
    # Options come from the file, also those that decide which states there are.
    own = {} if into == "trained without options" else options
    other = twins(SHAPES, optimizer_class, config=config(packed), **own)
    train(other, 0 if into == "fresh" else 2)
    exchange(pair, other)
    train(other, 2)
    train(pair, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"swap_times": 1},
        {"swap_times": 100},
        {"min_numel": 10**6},
        {"min_numel": 0},
        {"state_keys": ("exp_avg_sq",)},
        {"staging_buffers": 5},
        {"packed": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:swap_optimizer. none of the")
@BOTH
def test_with_another_config(
    twins: Callable[..., Any], train: Callable[..., None], other: dict[str, Any], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2, SOME)
    to = twins(SHAPES, config=config(**{"packed": packed, **other}))
    train(to, 1)
    copy_parameters(pair, to)
    to.swapped.load_state_dict(pair.swapped.state_dict())
    to.native.load_state_dict(copy.deepcopy(pair.native.state_dict()))
    to.check()
    train(to, 2)


@BOTH
@pytest.mark.parametrize("trained", [0, 2])
def test_around_add_param_group(
    twins: Callable[..., Any], train: Callable[..., None], trained: int, packed: bool
) -> None:
    def grow(pair: Any) -> None:
        for optimizer in (pair.native, pair.swapped):
            params = [nn.Parameter(torch.linspace(0, 1, n)) for n in (9, 1, 30)]
            optimizer.add_param_group({"params": params, "lr": 0.3})

    small = twins(SHAPES, config=config(packed))
    train(small, 2)
    before = twins(SHAPES, config=config(packed))
    train(before, trained)
    exchange(small, before)  # then a group is added
    grow(before)
    train(before, 2)

    grow(small)
    train(small, 1)
    after = twins(SHAPES, config=config(packed))
    train(after, trained)
    with pytest.raises(StateDictError, match=r"number of parameter groups: 2, and this .* 1\. .*"):
        after.swapped.load_state_dict(small.swapped.state_dict())
    after.check()
    grow(after)
    exchange(small, after)
    train(after, 2)


@BOTH
def test_parameters_without_state(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """Absent, or there and empty, as torch.distributed.checkpoint has them."""
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2, SOME)
    state_dict = pair.swapped.state_dict()
    assert 2 not in state_dict["state"]
    state_dict["state"][2] = {}
    to = twins(SHAPES, config=config(packed))
    train(to, 2)
    copy_parameters(pair, to)
    to.native.load_state_dict(copy.deepcopy(state_dict))
    to.swapped.load_state_dict(state_dict)
    to.check()
    train(to, 1, [True, True, False, True, True])
    train(to, 2)


@BOTH
def test_one_parameter_listed_twice(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    def tied() -> list[nn.Parameter]:
        one, other = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(30))
        return [one, other, one]

    with pytest.warns(UserWarning, match="duplicate parameters"):
        pair, to = (twins(tied, config=config(packed)) for _ in range(2))
    train(pair, 2)
    exchange(pair, to)
    train(to, 2)
    plain = twins([(20,), (30,), (20,)], config=config(packed))
    with pytest.raises(StateDictError, match="2 different parameters, and the optimizer has 3"):
        plain.swapped.load_state_dict(pair.swapped.state_dict())


# From what.


@BOTH
@pytest.mark.parametrize("fused", [None, True], ids=["for-loop", "fused"])
@pytest.mark.parametrize("param", ["float32", "bfloat16", "float64", "float16"])
@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float64"])
def test_casts_are_native(
    twins: Callable[..., Any],
    train: Callable[..., None],
    saved: str,
    param: str,
    fused: bool | None,
    packed: bool,
) -> None:
    """States take the parameter's dtype in both directions; counters keep theirs unless fused."""
    pair = twins(SHAPES, dtype=getattr(torch, saved), config=config(packed))
    train(pair, 2, SOME)
    to = twins(SHAPES, dtype=getattr(torch, param), config=config(packed), fused=fused)
    state_dict = copy.deepcopy(pair.native.state_dict())
    state_dict["param_groups"][0]["fused"] = fused
    state_dict["state"][0]["step"] = state_dict["state"][0]["step"].double()
    to.native.load_state_dict(copy.deepcopy(state_dict))
    to.swapped.load_state_dict(state_dict)
    to.check()
    first = to.swapped.param_groups[0]["params"][0]
    assert to.swapped.state[first]["exp_avg"].dtype == getattr(torch, param)
    if fused or param == saved:  # for-loop kernels refuse a counter in float64 beside float32
        train(to, 2)


@BOTH
def test_strides_are_native(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """Those of the state dict, made dense where it has gaps."""
    pair = twins([(6, 50)], config=config(packed))
    train(pair, 2)
    state_dict = copy.deepcopy(pair.native.state_dict())
    state = state_dict["state"][0]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    state["exp_avg_sq"] = state["exp_avg_sq"].repeat(1, 2)[:, :50].clone()
    to = twins([(6, 50)], config=config(packed))
    copy_parameters(pair, to)
    to.native.load_state_dict(copy.deepcopy(state_dict))
    to.swapped.load_state_dict(state_dict)
    to.check()
    gaps = torch.zeros(6, 100)[:, :50]
    to.swapped.load_state_dict({**state_dict, "state": {0: {**state, "exp_avg": gaps}}})
    shown = to.swapped.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(shown, gaps)
    assert shown.untyped_storage().nbytes() == shown.nbytes


def test_old_files(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    """Counters were Python numbers once, and options are missing that were added later."""
    pair = twins(SHAPES, config=config())
    train(pair, 2)
    state_dict = copy.deepcopy(pair.native.state_dict())
    for state in state_dict["state"].values():
        state["step"] = int(state["step"])
    for option in ("foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad"):
        del state_dict["param_groups"][0][option]
    to = twins(SHAPES, config=config())
    copy_parameters(pair, to)
    to.native.load_state_dict(copy.deepcopy(state_dict))
    to.swapped.load_state_dict(state_dict)
    to.check()
    train(to, 2)


def test_other_values_and_states_that_are_not_used(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    pair = twins(SHAPES, config=config(), amsgrad=True)
    train(pair, 2)
    state_dict = copy.deepcopy(pair.native.state_dict())
    state_dict["param_groups"][0]["amsgrad"] = False
    state_dict["state"][0]["note"] = {"a": [1, 2]}
    state_dict["state"]["whole"] = {"b": 3}
    to = twins(SHAPES, config=config())
    copy_parameters(pair, to)
    to.native.load_state_dict(copy.deepcopy(state_dict))
    to.swapped.load_state_dict(state_dict)
    to.check()
    assert to.swapped.state["whole"] == to.native.state["whole"] == {"b": 3}
    state_dict["state"][0]["note"]["a"].append(3)
    to.check()
    train(to, 2)


def test_hooks_may_edit_what_is_loaded(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    calls: list[str] = []

    def attach(optimizer: Optimizer) -> None:
        def before(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            calls.append("pre")
            state = {index: dict(entry) for index, entry in state_dict["state"].items()}
            state[0]["exp_avg"] = state[0]["exp_avg"] * 2
            return {**state_dict, "state": state}

        def after(optimizer: Optimizer) -> None:
            calls.append("post")
            first = optimizer.param_groups[0]["params"][0]
            optimizer.state[first]["exp_avg_sq"].mul_(3)

        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(after)

    pair = twins(SHAPES, config=config())
    train(pair, 2)
    to = twins(SHAPES, config=config(), prepare=attach)
    exchange(pair, to)
    assert calls == ["pre", "post"] * 2
    expected = pair.native.state_dict()["state"][0]
    first = to.swapped.param_groups[0]["params"][0]
    assert torch.equal(to.swapped.state[first]["exp_avg"], expected["exp_avg"] * 2)
    assert torch.equal(to.swapped.state[first]["exp_avg_sq"], expected["exp_avg_sq"] * 3)
    train(to, 2)


# What it copies.


@BOTH
def test_nothing_of_the_state_dict_is_kept_or_changed(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed), lr=torch.tensor(0.1))
    train(pair, 2)
    state_dict = copy.deepcopy(pair.native.state_dict())
    expected = copy.deepcopy(state_dict)
    to = twins(SHAPES, config=config(packed), lr=torch.tensor(0.1))
    copy_parameters(pair, to)
    to.native.load_state_dict(copy.deepcopy(state_dict))
    to.swapped.load_state_dict(state_dict)
    train(to, 2)
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            given = state_dict["state"][index][key]
            assert same_bits(given, value)
            given.fill_(9)
    state_dict["param_groups"][0]["lr"].fill_(9)
    to.check()
    train(to, 1)


@BOTH
def test_two_optimizers_that_load_one_state_dict_share_nothing(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    state_dict = pair.swapped.state_dict()
    others = [twins(SHAPES, config=config(packed)) for _ in range(2)]
    for other in others:
        copy_parameters(pair, other)
        other.swapped.load_state_dict(state_dict)
        other.native.load_state_dict(copy.deepcopy(pair.native.state_dict()))
    train(others[0], 3)
    others[1].check()
    pair.check()


@BOTH
def test_memory_is_used_again(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 3)
    saved = copy.deepcopy(pair.native.state_dict())
    train(pair, 1)
    before = pair.swapped.swap_report().ledger
    for optimizer in (pair.native, pair.swapped):
        optimizer.load_state_dict(copy.deepcopy(saved))
    pair.check()
    # Its own state dict, which has the very memory.
    pair.swapped.load_state_dict(pair.swapped.state_dict())
    pair.check()
    after = pair.swapped.swap_report().ledger
    assert before.host_allocations == after.host_allocations
    assert pair.device.host_bytes == before.host_bytes == after.host_bytes
    train(pair, 2)
    assert pair.swapped.swap_report().ledger.host_allocations == before.host_allocations


@BOTH
@pytest.mark.parametrize("kept", ["tensor", "entry", "state", "shallow copy"])
def test_states_that_were_taken_out_before_keep_their_values(
    twins: Callable[..., Any], train: Callable[..., None], kept: str, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    saved = copy.deepcopy(pair.native.state_dict())
    train(pair, 2)
    held = []
    for optimizer in (pair.native, pair.swapped):
        first = optimizer.param_groups[0]["params"][0]
        take: dict[str, Callable[[], Any]] = {
            "tensor": lambda f=first, o=optimizer: {f: {"exp_avg": o.state[f]["exp_avg"]}},
            "entry": lambda f=first, o=optimizer: {f: o.state[f]},
            "state": lambda o=optimizer: o.state,
            "shallow copy": lambda o=optimizer: dict(o.state),
        }
        held.append((first, take[kept]()))
        optimizer.load_state_dict(copy.deepcopy(saved))
    train(pair, 2)
    (p, native), (q, swapped) = held
    assert same_bits(native[p]["exp_avg"], swapped[q]["exp_avg"])
    assert list(native[p]) == list(swapped[q])


@BOTH
def test_states_of_other_parameters_of_itself(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """A state dict over its own memory, with two parameters exchanged."""
    pair = twins([(30,), (30,), (9,)], config=config(packed))
    train(pair, 2)
    for optimizer in (pair.native, pair.swapped):
        state_dict = optimizer.state_dict()
        state = state_dict["state"]
        state[0], state[1] = (
            copy.deepcopy(state[1]) if optimizer is pair.native else state[1],
            state[0],
        )
        optimizer.load_state_dict(state_dict)
        del state_dict, state
    pair.check()
    train(pair, 2)


# What it refuses.


def without(state_dict: dict[str, Any], key: str) -> None:
    del state_dict[key]


def other_state(state_dict: dict[str, Any], index: int, key: str, value: Any) -> None:
    if value is None:
        del state_dict["state"][index][key]
    else:
        state_dict["state"][index][key] = value


def other_option(state_dict: dict[str, Any], key: str, value: Any) -> None:
    state_dict["param_groups"][1][key] = value


def fewer_parameters(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][1]["params"].pop()


def other_order(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][1]["param_names"].reverse()


def shifted(state_dict: dict[str, Any]) -> None:
    state = state_dict["state"]
    state[2], state[3] = state[3], state[2]


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no state": (lambda s: without(s, "state"), r"no 'state' in .* has \['param_groups'\]"),
    "no groups": (lambda s: without(s, "param_groups"), "no 'param_groups' in"),
    "groups": (lambda s: s["param_groups"].pop(), r"number of parameter groups: 1, and this .* 2"),
    "count": (fewer_parameters, r"param group 1 of the state dict has 2 parameters, and .* 3"),
    "order of names": (
        other_order,
        "param group 1 .* different order: its parameter 0 is 'c'.*'e'",
    ),
    "order of shapes": (
        shifted,
        r"exp_avg of group 1, parameter 0 \(c\) has the shape \(7, 2\), .* \(40,\)\. .* order",
    ),
    "key": (
        lambda s: other_state(s, 3, "exp_avg_sq", None),
        r"group 1, parameter 1 \(d\) lacks 'exp_avg_sq'; it has 'step', 'exp_avg'",
    ),
    "counter": (lambda s: other_state(s, 3, "step", None), r"parameter 1 \(d\) lacks 'step'"),
    "counters": (
        lambda s: other_state(s, 0, "step", torch.ones(2)),
        r"step of group 0, parameter 0 \(a\) is a tensor of shape \(2,\)",
    ),
    "a string": (
        lambda s: other_state(s, 0, "exp_avg", "x"),
        r"exp_avg of group 0, parameter 0 \(a\) is a str; a dense tensor of shape \(3, 50\)",
    ),
    "sparse": (
        lambda s: other_state(s, 0, "exp_avg", torch.ones(3, 50).to_sparse()),
        r"exp_avg of group 0, parameter 0 \(a\) is a tensor of shape \(3, 50\), layout torch.spar",
    ),
    "meta": (
        lambda s: other_state(s, 0, "exp_avg", torch.ones(3, 50, device="meta")),
        r"exp_avg of group 0, parameter 0 \(a\) is on the meta device",
    ),
    "entry": (lambda s: s["state"].update({4: 5}), r"group 1, parameter 2 \(e\) is a int"),
    "amsgrad": (
        lambda s: other_option(s, "amsgrad", True),
        r"parameter 0 \(c\) lacks 'max_exp_avg_sq'",
    ),
    "foreach": (
        lambda s: other_option(s, "foreach", True),
        r"state_dict\['param_groups'\]\[1\].*foreach=True in param group 1 of the state dict",
    ),
}


@BOTH
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused_before_anything_changes(
    twins: Callable[..., Any], train: Callable[..., None], mistake: str, packed: bool
) -> None:
    def groups() -> list[dict[str, Any]]:
        named = [
            (name, nn.Parameter(torch.ones(s))) for name, s in zip("abcde", SHAPES, strict=True)
        ]
        return [{"params": named[:2]}, {"params": named[2:], "lr": 0.2}]

    pair = twins(groups, config=config(packed))
    train(pair, 2)
    spoil, message = MISTAKES[mistake]
    state_dict = copy.deepcopy(pair.swapped.state_dict())
    for entry in state_dict["state"].values():
        entry["exp_avg"].fill_(7)
    state_dict["param_groups"][0]["lr"] = 7.0
    spoil(state_dict)
    objects = [pair.swapped.state, pair.swapped.param_groups]
    with pytest.raises(StateDictError, match=message):
        pair.swapped.load_state_dict(state_dict)
    assert objects[0] is pair.swapped.state
    assert objects[1] is pair.swapped.param_groups
    assert not pair.swapped._optimizer_load_state_dict_pre_hooks
    pair.check()
    train(pair, 2)


def test_names_that_are_all_other_do_not_matter(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    """As natively: the model was renamed."""

    def named(*names: str) -> Callable[[], list[tuple[str, nn.Parameter]]]:
        return lambda: [(name, nn.Parameter(torch.ones(20))) for name in names]

    pair = twins(named("a", "b"), config=config())
    train(pair, 2)
    to = twins(named("x", "y"), config=config())
    exchange(pair, to)
    assert to.swapped.param_groups[0]["param_names"] == ["a", "b"]
    train(to, 1)


@BOTH
def test_no_device_memory_for_what_stays_changes_nothing(
    twins: Callable[..., Any],
    train: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    other = copy.deepcopy(pair.native.state_dict())
    train(pair, 1)

    def no_room(self: LoadedState) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"planted for {self.key}")

    monkeypatch.setattr(LoadedState, "where_it_stays", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="planted for step"):
        pair.swapped.load_state_dict(other)
    monkeypatch.undo()
    pair.check()
    train(pair, 2)
    for optimizer in (pair.native, pair.swapped):
        optimizer.load_state_dict(copy.deepcopy(other))
    train(pair, 1)


@BOTH
def test_an_allocation_that_fails_changes_nothing(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    device = TorchRecordingDevice(CpuAsDevice(poison=True))
    pair = twins(SHAPES, config=config(packed), device=device)
    train(pair, 2)
    other = copy.deepcopy(pair.native.state_dict())
    train(pair, 1)
    held = dict(pair.swapped.state)  # so that other memory is wanted
    device.tamper = Tamper("allocate_host", 0, MemoryError("no host memory"))
    with pytest.raises(MemoryError, match="no host memory"):
        pair.swapped.load_state_dict(other)
    device.tamper = None
    assert isinstance(pair.swapped.state, defaultdict)
    pair.check()
    train(pair, 2)
    del held
    pair.swapped.load_state_dict(other)
    pair.native.load_state_dict(copy.deepcopy(other))
    pair.check()
    train(pair, 2)
    assert_same_bits(pair.native, pair.swapped)
