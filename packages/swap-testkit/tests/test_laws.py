# SPDX-License-Identifier: Apache-2.0
"""Adapters broken in known ways, and the laws that report each of them.

| fault                                           | reported by               |
| ----------------------------------------------- | ------------------------- |
| nothing                                         | .                         |
| counters advance once more                      | all                       |
| parameters are updated twice                    | all                       |
| the last parameter of each batch is left out    | all                       |
| the whole group is updated with its first batch | memory                    |
| all groups have the first one's options         | groups                    |
| options are those of the first step             | groups                    |
| states begin with zeros                         | all                       |
| what the optimizer made is forgotten            | all                       |
| what the group counts is forgotten              | all                       |
| the group counts batches                        | all                       |
| hooks run for each batch                        | hooks                     |
| a state is not named                            | memory                    |
| a state has another name                        | keys, memory, state dicts |
| the template has another shape                  | memory, state dicts       |
| states are other tensors after each step        | memory, steady state      |
| counters advance before anything can fail       | failures                  |
| a refusal names no states                       | keys                      |
| an unknown key is accepted                      | keys                      |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from swap_core import SwapOptimizerConfig, UnknownStateKeyError
from swap_testkit.torch.laws import LAWS, LawBrokenError, Subject, check_law
from swap_torch import PerParameterAdapter

torch.set_num_threads(1)


class Example(Optimizer):
    """Has what can go wrong: states that do not begin with zeros, counters of two kinds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "rate": 0.9, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["age"] = 0
                    state["mean"] = param.grad.clone()
                    state["square"] = torch.zeros_like(param)
                state["age"] += 1
                state["mean"].mul_(group["rate"]).add_(param.grad)
                state["square"].addcmul_(param.grad, param.grad)
                size = state["square"].sqrt().add_(1.0)
                param.addcdiv_(state["mean"], size, value=-group["lr"] / (1 + state["age"]))


class Good(PerParameterAdapter):
    """Right in everything."""

    optimizer_class = Example
    state_names = ("mean", "square")
    counter_names = ("age",)

    def entries(self, call: Any) -> list[dict[str, Any]]:
        """What ``optimizer.state`` has of the call's parameters."""
        state = vars(self.optimizer)["state"]
        return [state[member.param] for member in call.members if member.param in state]


class CountsMore(Good):
    """counters advance once more"""

    def step_batch(self, step: Any, call: Any) -> None:
        super().step_batch(step, call)
        for entry in self.entries(call):
            entry["age"] += 1


class UpdatesTwice(Good):
    """parameters are updated twice"""

    def step_batch(self, step: Any, call: Any) -> None:
        super().step_batch(step, call)
        super().step_batch(step, call)


class LeavesOne(Good):
    """the last parameter of each batch is left out"""

    def step_batch(self, step: Any, call: Any) -> None:
        super().step_batch(step, replace(call, members=call.members[:-1]))


class WholeGroup(Good):
    """the whole group is updated with its first batch"""

    def step_batch(self, step: Any, call: Any) -> None:
        if call.group_index in step.stepped:
            return
        params = [p for p in step.params[call.group_index] if p.grad is not None]
        known = {member.param: member for member in call.members}
        blank = call.members[0]
        members = [known.get(p, replace(blank, param=p, places={})) for p in params]
        super().step_batch(step, replace(call, members=tuple(members)))


class FirstGroup(Good):
    """all groups have the first one's options"""

    def step_batch(self, step: Any, call: Any) -> None:
        step.groups[call.group_index] |= {"rate": step.groups[0]["rate"]}
        super().step_batch(step, call)


class OldOptions(Good):
    """options are those of the first step"""

    seen: Mapping[int, float] = {}

    def step_batch(self, step: Any, call: Any) -> None:
        index = call.group_index
        self.seen = {index: step.groups[index]["lr"], **self.seen}
        step.groups[index]["lr"] = self.seen[index]
        super().step_batch(step, call)


class BeginsWithZeros(Good):
    """states begin with zeros"""

    def step_batch(self, step: Any, call: Any) -> None:
        state = vars(self.optimizer)["state"]
        for member in call.members:
            if member.param not in state:
                zeros = {key: torch.zeros_like(member.param) for key in self.state_names}
                state[member.param] = {"age": 0, **zeros}
        super().step_batch(step, call)


class Forgets(Good):
    """what the optimizer made is forgotten"""

    def step_batch(self, step: Any, call: Any) -> None:
        before = len(vars(self.optimizer)["state"])
        super().step_batch(step, call)
        if len(vars(self.optimizer)["state"]) > before:
            for entry in self.entries(call):
                entry.clear()


class ForgetsCounts(Good):
    """what the group counts is forgotten"""

    def step_batch(self, step: Any, call: Any) -> None:
        group = self.optimizer.param_groups[call.group_index]
        before = group["calls"]
        super().step_batch(step, call)
        group["calls"] = before


class CountsBatches(Good):
    """the group counts batches"""

    def step_batch(self, step: Any, call: Any) -> None:
        again = call.group_index in step.stepped
        super().step_batch(step, call)
        self.optimizer.param_groups[call.group_index]["calls"] += again


class RunsHooks(Good):
    """hooks run for each batch"""

    def step_batch(self, step: Any, call: Any) -> None:
        super().step_batch(step, call)
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})


class NamesTooFew(Good):
    """a state is not named"""

    state_names = ("mean",)


class NamesAnother(Good):
    """a state has another name"""

    state_names = ("mean", "squares")


class OtherShape(Good):
    """the template has another shape"""

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        return param if key == "mean" else param.new_empty(param.numel() + 1)


class NewTensors(Good):
    """states are other tensors after each step"""

    def finish_step(self, step: Any) -> None:
        super().finish_step(step)
        for entry in vars(self.optimizer)["state"].values():
            entry["mean"] = entry["mean"].clone()


class CountsEarly(Good):
    """counters advance before anything can fail"""

    def prepare_step(self) -> Any:
        step = super().prepare_step()
        for param, entry in vars(self.optimizer)["state"].items():
            entry["age"] += param.grad is not None
        return step

    def step_batch(self, step: Any, call: Any) -> None:
        for entry in self.entries(call):
            entry["age"] -= 1
        super().step_batch(step, call)


class SaysLittle(Good):
    """a refusal names no states"""

    def validate(self, config: SwapOptimizerConfig) -> None:
        if set(config.state_keys or ()) - set(self.state_names):
            raise UnknownStateKeyError("wrong key")


class TakesAnything(Good):
    """an unknown key is accepted"""

    def validate(self, config: SwapOptimizerConfig) -> None:
        pass


FAULTS: dict[str, type[Good]] = {
    "nothing": Good,
    **{str(kind.__doc__): kind for kind in Good.__subclasses__()},
}
TABLE = {
    name.strip(): [law.strip() for law in laws.split(",")]
    for name, laws in (
        line.strip("| ").split("|") for line in str(__doc__).splitlines() if line[:2] == "| "
    )
    if not name.startswith(("fault", "-"))
}


def subject(adapter: type[PerParameterAdapter]) -> Subject:
    return Subject(Example, adapter, group_options=({"lr": 0.03, "rate": 0.5},))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_by_these_laws(fault: str) -> None:
    found = []
    for law in LAWS:
        try:
            check_law(law, subject(FAULTS[fault]))
        except LawBrokenError as error:
            found.append(str(error).partition(" (")[0])
    expected = {".": [], "all": [*LAWS]}.get(TABLE[fault][0], TABLE[fault])
    assert found == [f"law {law!r}" for law in expected]


def test_the_table_has_every_fault() -> None:
    assert [*TABLE] == [*FAULTS]


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(ValueError, match="law 'beauty' is unknown; there are: bits, gradients"):
        check_law("beauty", subject(Good))
