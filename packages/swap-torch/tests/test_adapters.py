# SPDX-License-Identifier: Apache-2.0
"""Every adapter that swap-torch has holds to every law of the testkit, with options that matter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

from swap_core import StateDictError
from swap_testkit.torch.laws import LAWS, LawBrokenError, Subject, check_law
from swap_testkit.torch.laws.subject import Pair, law_config
from swap_torch import SwapOptimizerConfig
from swap_torch.finding import find_torch_adapter

torch.set_num_threads(1)

MATRICES = ((5, 7), (12, 4), (4, 12), (9, 9))


def subject(
    kind: type[Optimizer], *others: Mapping[str, Any], shapes: Any = None, **options: Any
) -> Subject:
    """An optimizer with ``options``, and with ``others`` in further groups."""
    groups = [{"lr": 0.003, **other} for other in others or ({},)]
    plain: dict[str, Any] = {} if shapes is None else {"shapes": shapes}
    return Subject(partial(kind, lr=0.01, **options), group_options=groups, **plain)


DECAY = {"weight_decay": 0.1, "maximize": True}
SUBJECTS = {
    "SGD": subject(optim.SGD, DECAY, {"momentum": 0.5, "nesterov": True}, momentum=0.9),
    "SGD-foreach": subject(optim.SGD, DECAY, momentum=0.9, dampening=0.3, foreach=True),
    "NAdam": subject(optim.NAdam, {**DECAY, "decoupled_weight_decay": True}),
    "RAdam-foreach": subject(optim.RAdam, DECAY, foreach=True),
    "Adagrad": subject(optim.Adagrad, DECAY, initial_accumulator_value=0.2, lr_decay=0.1),
    "Adagrad-fused": subject(optim.Adagrad, {"weight_decay": 0.1}, fused=True),
    "RMSprop": subject(optim.RMSprop, {"centered": False}, DECAY, momentum=0.9, centered=True),
    "Adamax": subject(optim.Adamax, DECAY),
    "Adadelta": subject(optim.Adadelta, DECAY),
    "ASGD": subject(optim.ASGD, DECAY, t0=2),
    "Rprop": subject(optim.Rprop, {"maximize": True}),
    "Adafactor": subject(
        optim.Adafactor, DECAY, shapes=(*MATRICES, (33,), (2, 3, 4)), weight_decay=0.1
    ),
    "Muon": subject(
        torch.optim.Muon,
        {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        shapes=MATRICES,
    ),
}


def adagrad_takes_groups_later() -> bool:
    """Whether it makes states for groups that are added; torch 2.10 does not (its issue 53712)."""
    first, late = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = optim.Adagrad([first])
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_law(name: str, law: str) -> None:
    if law == "groups" and name.startswith("Adagrad") and not adagrad_takes_groups_later():
        with pytest.raises(LawBrokenError, match=r"KeyError\('sum'\)"):  # as natively
            check_law(law, SUBJECTS[name])
    else:
        check_law(law, SUBJECTS[name])


def test_every_installed_adapter_has_a_subject() -> None:
    """But those that have tests of their own; torchao's are in examples/torchao."""
    installed = {entry.name for entry in entry_points(group="swap_core.adapters")}
    tried = {f"torch.{name.partition('-')[0].lower()}" for name in SUBJECTS}
    expected = {name for name in installed if name.startswith("torch.")}
    elsewhere = {"adam", "adamw", "hyper_parallel_adamw", "torchao"}
    assert expected - tried == {f"torch.{name}" for name in elsewhere}


WITH_ADAM = {**SUBJECTS, "Adam": subject(optim.Adam, amsgrad=True), "AdamW": subject(optim.AdamW)}


def load_and_step(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    optimizer.load_state_dict(copy.deepcopy(state_dict))
    optimizer.step()


def goes_on(optimizer: Optimizer, state_dict: dict[str, Any]) -> bool:
    """Whether it can be loaded, and updates made after it."""
    try:
        load_and_step(optimizer, state_dict)
    except (KeyError, TypeError, StateDictError):
        return False
    return True


@pytest.mark.parametrize("name", WITH_ADAM)
def test_files_that_lack_an_option(name: str) -> None:
    """Native knows some options of old files, and fails at a later step without the others."""
    options = WITH_ADAM[name].make(WITH_ADAM[name].parameters()).param_groups[0].keys()
    refused = []
    for option in options - {"params", "param_names"}:
        pair = Pair(WITH_ADAM[name], law_config())
        pair.train(2)
        state_dict = copy.deepcopy(pair.native.state_dict())
        del state_dict["param_groups"][0][option]
        pair.give_gradients()
        if goes_on(pair.native, state_dict):
            assert goes_on(pair.swapped, state_dict), option
            pair.check()
            continue
        refused.append(option)
        before = copy.deepcopy(pair.swapped.state_dict()["param_groups"])
        with pytest.raises((KeyError, StateDictError), match=f"{option}") as told:
            load_and_step(pair.swapped, state_dict)
        if told.type is StateDictError:
            assert f"has no option {option!r}" in str(told.value)
            assert pair.swapped.state_dict()["param_groups"] == before
    assert refused


@pytest.mark.parametrize("name", SUBJECTS)
def test_an_adapter_is_found_by_class_and_names_it(name: str) -> None:
    optimizer = SUBJECTS[name].make(SUBJECTS[name].parameters())
    adapter = find_torch_adapter(optimizer)
    assert adapter.supports() == f"torch.optim.{type(optimizer).__name__}"


REFUSED: list[tuple[Callable[..., Optimizer], str]] = [
    (kind, option)
    for kind, options in {
        optim.SGD: ("differentiable",),
        optim.NAdam: ("capturable", "differentiable"),
        optim.RAdam: ("capturable", "differentiable"),
        optim.Adagrad: ("differentiable",),
        optim.RMSprop: ("capturable", "differentiable"),
        optim.Adamax: ("capturable", "differentiable"),
        optim.Adadelta: ("capturable", "differentiable"),
        optim.ASGD: ("capturable", "differentiable"),
        optim.Rprop: ("capturable", "differentiable"),
    }.items()
    for option in options
]


@pytest.mark.parametrize(("kind", "option"), REFUSED)
def test_options_that_cannot_be_combined(kind: type[Optimizer], option: str) -> None:
    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))]
    bad = {"params": params[1:], option: True}
    optimizer = kind([{"params": params[:1]}, bad])  # type: ignore[call-arg]
    message = rf"torch.optim.{kind.__name__} with {option}=True in param group 1.*{option}=False"
    with pytest.raises(ValueError, match=message):
        find_torch_adapter(optimizer)(optimizer).validate(SwapOptimizerConfig())
