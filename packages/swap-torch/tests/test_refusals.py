# SPDX-License-Identifier: Apache-2.0
"""Every refusal: its type, that its message tells all, and that nothing was changed.

A message names the subject, the value that was found, what is accepted, and the remedy: the words
in the tables below.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW

from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig as Config
from swap_torch import engine, is_swap_optimizer, swap_optimizer


def parameter(numel: int = 2048, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    param = torch.nn.Parameter((torch.arange(numel) / numel).to(dtype))
    param.grad = torch.full_like(param, 0.5)
    return param


def wrap(optimizer: Any, config: Config | None = None) -> Any:
    return swap_optimizer(optimizer, config, device=CpuAsDevice())


def contents(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Class, attributes, and every value that an update could change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    states = [
        [(key, torch.as_tensor(value).tolist()) for key, value in optimizer.state[param].items()]
        for param in params
        if param in optimizer.state
    ]
    values = [[param.tolist() for param in params], copy.deepcopy(options), states]
    return [type(optimizer), set(vars(optimizer)), *values]


def refused(
    call: Callable[[], Any], error: type[Exception], words: tuple[str, ...], *unchanged: Any
) -> None:
    before = [contents(optimizer) for optimizer in unchanged]
    with pytest.raises(error) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
    assert [contents(optimizer) for optimizer in unchanged] == before


# A2: the config.

BOOL = "give True or False"
CONFIGS: list[tuple[str, Any, str]] = [
    *[("swap_times", value, "give an integer >= 1") for value in (0, -3, True, 4.0, "16", None)],
    *[("min_numel", value, "give an integer >= 0") for value in (-1, False, 1.5, "0", None)],
    *[("staging_buffers", value, "give an integer >= 2") for value in (1, 0, True, 2.0, None)],
    *[
        ("state_keys", value, 'such as ("exp_avg", "exp_avg_sq"), or None')
        for value in ("exp_avg", (), [], ("exp_avg", "exp_avg"), (1,), 7, (None,))
    ],
    *[("include_master_params", value, BOOL) for value in (1, None, "yes")],
    *[("allow_closure", value, BOOL) for value in (0, None, "no")],
    *[("packed_swap", value, BOOL + " or None") for value in (1, "packed", 0.0)],
]


@pytest.mark.parametrize(("field", "value", "accepted"), CONFIGS)
def test_config_fields_are_checked(field: str, value: Any, accepted: str) -> None:
    optimizer = AdamW([parameter()])
    words = ("SwapOptimizerConfig", f"{field}={value!r}", accepted)
    refused(lambda: wrap(optimizer, Config(**{field: value})), ValueError, words, optimizer)


def test_the_config_takes_keywords_only_and_is_frozen() -> None:
    refused(lambda: Config(4), TypeError, ("positional",))  # type: ignore[misc]
    refused(lambda: Config(swap_time=4), TypeError, ("swap_time",))  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().swap_times = 4  # type: ignore[misc]


# A2 and A3: configs that do not fit the optimizer.

HAS = "It has: exp_avg, exp_avg_sq."


@pytest.mark.parametrize("optimizer_class", [Adam, AdamW])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"include_master_params": True}, ("MindFormers AdamW", "Leave it False")),
        ({"state_keys": ("max_exp_avg_sq",)}, ("'max_exp_avg_sq'", "amsgrad=True", HAS)),
        ({"state_keys": ("exp_avg", "momentum_buffer")}, ("'momentum_buffer'", HAS)),
        ({"state_keys": ("master_param",)}, ("'master_param'", HAS)),
        ({"state_keys": ["exp_avgs"]}, ("'exp_avgs'", HAS)),
        ({"state_keys": ("step",)}, ("'step'", HAS)),
    ],
)
def test_configs_of_other_optimizers(
    optimizer_class: Any, config: dict[str, Any], words: tuple[str, ...]
) -> None:
    optimizer = optimizer_class([parameter()])
    subject = (f"torch.optim.{optimizer_class.__name__}", *config)
    refused(lambda: wrap(optimizer, Config(**config)), ValueError, subject + words, optimizer)


def test_a_key_that_one_group_has_is_accepted() -> None:
    optimizer = AdamW([{"params": [parameter()]}, {"params": [parameter()], "amsgrad": True}])
    assert is_swap_optimizer(wrap(optimizer, Config(state_keys=("max_exp_avg_sq",))))


# A4: the one warning.


@pytest.mark.parametrize(
    ("param", "device", "reason"),
    [
        (parameter(), None, "its parameter is on the CPU"),
        (parameter(10), CpuAsDevice(), "fewer elements than min_numel"),
        (parameter(dtype=torch.complex64), CpuAsDevice(), "not a floating point tensor"),
    ],
    ids=["cpu", "small", "complex"],
)
def test_one_warning_when_nothing_can_swap(param: Any, device: Any, reason: str) -> None:
    optimizer = AdamW([param])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swap_optimizer(optimizer, device=device)
        optimizer.step()
        optimizer.step()
    assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)]
    for word in ("torch.optim.AdamW", "none of the 2 states", reason, "works as before"):
        assert word in str(caught[0].message)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", ["nothing swaps", "too little host memory", "not pinned"])
def test_a_warning_that_is_an_error_leaves_the_optimizer_as_it_was(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    param, device = parameter(), CpuAsDevice()
    unborn = torch.nn.Parameter(torch.ones(2048))
    optimizer = AdamW([param, unborn], fused=True)
    optimizer.step()
    config = Config()
    if what == "nothing swaps":
        config = Config(min_numel=1 << 20)
    elif what == "too little host memory":
        monkeypatch.setattr(engine, "available_host_memory", lambda: 0)
    else:
        told = functools.partial(warnings.warn, "not pinned", stacklevel=2)
        monkeypatch.setattr(device, "allocate_host", lambda nbytes: told())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    entry = optimizer.state[param]
    states = dict(entry)
    refused(lambda: swap_optimizer(optimizer, config, device=device), Warning, (), optimizer)
    assert optimizer.state[param] is entry
    assert entry.keys() == states.keys()
    assert all(entry[key] is state for key, state in states.items())
    assert not is_swap_optimizer(optimizer)
    optimizer.step()
    scheduler.step()
    assert entry["step"].item() == 2.0


@pytest.mark.filterwarnings("error")
def test_no_warning_when_something_can_swap() -> None:
    wrap(AdamW([parameter(10), parameter()])).step()


# A5: optimizers.


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> None:
        """Something else."""


class OwnInit(Adam):
    def _init_group(self, *args: Any) -> bool:
        return super()._init_group(*args)


class SameStep(AdamW):
    """A subclass that only adds to AdamW."""


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "updates all parameters together"),
        (torch.optim.SparseAdam, "the rows that a sparse gradient names"),
        (OwnStep, ""),
        (OwnInit, ""),
    ],
)
def test_other_optimizers(kind: type[torch.optim.Optimizer], why: str) -> None:
    optimizer = kind([parameter()])  # type: ignore[call-arg]
    words = (
        f"swap_optimizer: optimizer is a {kind.__module__}.{kind.__qualname__}",
        *("Supported: torch.optim.", "torch.optim.Adam,", "torch.optim.AdamW,"),
        "hyper_parallel.core.optimizer.adamw.AdamW",
        "an adapter of its own",
        why,
    )
    refused(lambda: wrap(optimizer), ValueError, words, optimizer)


@pytest.mark.parametrize("thing", [object(), None, torch.nn.Linear(2, 2), [parameter()], AdamW])
def test_what_is_no_optimizer(thing: Any) -> None:
    name = f"{type(thing).__module__}.{type(thing).__qualname__}"
    refused(lambda: wrap(thing), ValueError, (name, "not supported", "torch.optim.AdamW"))


def test_a_subclass_with_the_same_step_is_accepted() -> None:
    optimizer = wrap(SameStep([parameter()]))
    assert is_swap_optimizer(optimizer)
    assert isinstance(optimizer, SameStep)


# A6: options.

OPTIONS = [
    *[(Adam, option) for option in ("foreach", "fused", "capturable", "differentiable")],
    *[(AdamW, option) for option in ("foreach", "capturable", "differentiable")],
]


@pytest.mark.parametrize("place", ["first", "second", "added", "changed"])
@pytest.mark.parametrize(("optimizer_class", "option"), OPTIONS)
def test_options_that_cannot_be_combined(optimizer_class: Any, option: str, place: str) -> None:
    words = (f"torch.optim.{optimizer_class.__name__}", f"{option}=True", f"set {option}=False")
    one, other = parameter(), parameter()
    bad = {"params": [other], option: True}
    if place == "first":
        optimizer = optimizer_class([one], **{option: True})
        refused(lambda: wrap(optimizer), ValueError, (*words, "param group 0"), optimizer)
    elif place == "second":
        optimizer = optimizer_class([{"params": [one]}, bad])
        refused(lambda: wrap(optimizer), ValueError, (*words, "param group 1"), optimizer)
    else:
        optimizer = wrap(optimizer_class([one]))
        optimizer.step()
        if place == "added":
            where, call = "the new param group 1", lambda: optimizer.add_param_group(bad)
        else:
            where, call = "param group 0", optimizer.step
            optimizer.param_groups[0][option] = True
        refused(call, ValueError, (*words, where), optimizer)
        assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0][option] = False
        optimizer.step()
        assert optimizer.state[one]["step"] == 2


def test_fused_adamw_is_accepted() -> None:
    assert is_swap_optimizer(wrap(AdamW([parameter()], fused=True)))


def test_wrapping_twice() -> None:
    optimizer = wrap(AdamW([parameter()]))
    words = ("swap_optimizer", repr(optimizer), "swaps already", "Wrap it once", "load its state")
    refused(lambda: wrap(optimizer, Config(swap_times=2)), ValueError, words, optimizer)


def test_a_replaced_step() -> None:
    optimizer = AdamW([parameter()])
    replacement = types.MethodType(lambda self: None, optimizer)
    optimizer.step = replacement  # type: ignore[method-assign]
    words = ("swap_optimizer: optimizer.step was replaced", "AdamW", repr(replacement), "Call swap")
    refused(lambda: wrap(optimizer), ValueError, words, optimizer)
    assert optimizer.step is replacement


def test_a_step_that_a_scheduler_replaced_is_accepted() -> None:
    optimizer = AdamW([parameter()])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    assert is_swap_optimizer(wrap(optimizer))


# A7: calls of step().


def test_a_closure_is_refused_unevaluated() -> None:
    optimizer = wrap(AdamW([parameter()]))
    optimizer.step()
    calls: list[int] = []

    def closure() -> None:
        calls.append(1)

    words = ("AdamW.step()", repr(closure), "allow_closure=True", "backward() and then step()")
    refused(lambda: optimizer.step(closure), ValueError, words, optimizer)
    assert not calls


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("optimizer_class", [Adam, AdamW])
def test_a_sparse_gradient(optimizer_class: Any, steps_before: int, packed: bool) -> None:
    embedding = torch.nn.Embedding(64, 32, sparse=True)
    named = [("bias", parameter()), ("table", embedding.weight), ("scale", parameter())]
    optimizer = wrap(optimizer_class(named), Config(packed_swap=packed))
    for _ in range(steps_before):
        optimizer.step()
    embedding(torch.tensor([3, 5])).sum().backward()
    words = (
        f"torch.optim.{optimizer_class.__name__} does not support sparse gradients",
        "group 0, parameter 1 (table) is sparse",
        "sparse=False",
        "use SparseAdam",
        "Nothing was updated",
    )
    refused(optimizer.step, RuntimeError, words, optimizer)
    embedding.weight.grad = None
    optimizer.step()


@pytest.mark.parametrize("config", [{"swap_times": 4}, {}, 16])
def test_a_config_of_another_type(config: Any) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="give a SwapOptimizerConfig") as refusal:
        swap_optimizer(optimizer, config)
    assert f"config={config!r}" in str(refusal.value)
    assert type(optimizer) is torch.optim.AdamW
