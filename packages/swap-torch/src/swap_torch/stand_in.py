# SPDX-License-Identifier: Apache-2.0
"""An optimizer's own step, on some of its parameters.

[Note: its own step]
Each batch is updated by the optimizer's own ``step``, called on a stand-in: an object of the
optimizer's class that has its attributes and one of its groups, with the batch's parameters only
and their states on the device. So results are native ones, whatever the optimizer computes, as long
as no parameter's update depends on another parameter.

States are made by the optimizer too, in the first batch that updates their parameter: they are
copied into the batch's device memory after the update, and stored with it. What the adapter says of
new states decides where they will live; if it is wrong, the state is on the device until the next
update.

What ``step`` changes in a group or in the optimizer itself, such as a counter, is seen by no other
batch of the same update, and kept once.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from swap_core import UnsupportedOptimizerError
from swap_torch.adapter import Group, TorchStep, TorchSwapAdapter
from swap_torch.fillers import Filler, Kind, Oddity
from swap_torch.optimizer import TorchSwapOptimizer
from swap_torch.parts import Member
from swap_torch.selection import OptimizerState

__all__ = ["PartStep", "remember", "step_part"]

_MISSING = object()
_NOT_SHARED = {"state", "param_groups", "step", "_swap"}
"""Attributes of the optimizer that a stand-in does not get: it has its own, or none."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(slots=True)
class PartStep(TorchStep):
    """What one call of ``step()`` works on, as it was when it began."""

    groups: list[Group] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    made: dict[tuple[object, str], Any] = field(default_factory=dict)
    """What calls changed, by the group's index (None: the optimizer itself) and key."""
    stepped: set[int] = field(default_factory=set)
    """Groups of which at least one part was updated."""
    odd: dict[int, dict[Oddity, set[Kind]]] = field(default_factory=dict)
    """By group, what one of its parameters was when the step began. See [Note: fillers]."""


def remember(step: TorchStep, optimizer: Optimizer) -> PartStep:
    """The same step, with the optimizer's groups and attributes as they are now."""
    return PartStep(
        params=step.params,
        masks=step.masks,
        options=step.options,
        grads=step.grads,
        groups=[dict(group) for group in optimizer.param_groups],
        attributes={k: v for k, v in vars(optimizer).items() if k not in _NOT_SHARED},
    )


def step_part(
    adapter: TorchSwapAdapter,
    step: PartStep,
    index: int,
    members: Sequence[Member],
    same: Mapping[str, Any],
    fillers: Sequence[Filler] = (),
) -> None:
    """Step a stand-in for the optimizer; see [Note: its own step].

    Args:
        adapter: Its optimizer gets what the stand-in made and changed, also if its step raises.
        step: Marked with what was changed.
        index: Which group.
        members: Those of its parameters that are updated.
        same: Options of the group that are other ones for the stand-in.
        fillers: Updated with them, and forgotten.

    Raises:
        UnsupportedOptimizerError: an earlier part of the step made something else of an attribute.
    """
    optimizer = adapter.optimizer
    state: OptimizerState = vars(optimizer)["state"]
    given = {member.param: member.given(state) for member in members}
    kind = _native_class(optimizer)
    stand_in = kind.__new__(kind)
    attributes = step.attributes | {hooks: OrderedDict() for hooks in _HOOKS}
    params = [member.param for member in members] + [filler.param for filler in fillers]
    group = {**step.groups[index], **same, "params": params}
    entries: OptimizerState = defaultdict(
        dict, {param: dict(entry) for param, entry in given.items() if entry is not None}
    )
    entries.update({filler.param: filler.entry for filler in fillers if filler.entry})
    vars(stand_in).update(attributes, param_groups=[group], state=entries)
    step.stepped.add(index)
    try:
        _bare_step(kind)(stand_in)
    finally:
        for member in members:
            _take_entry(member, given[member.param] or {}, entries, state)
        seen = {*_NOT_SHARED, *_HOOKS}
        changed = _changes(attributes, vars(stand_in), seen)
        _keep(adapter, step, None, changed, vars(optimizer))
        changed = _changes(step.groups[index], group, {"params", *same})
        _keep(adapter, step, index, changed, optimizer.param_groups[index])


def _keep(
    adapter: TorchSwapAdapter,
    step: PartStep,
    where: int | None,
    changed: Mapping[str, object],
    owner: dict[str, Any],
) -> None:
    """Keep what the first call changed; later ones of the same step must agree."""
    for key, value in changed.items():
        first = step.made.setdefault((where, key), value)
        if first is value:
            owner[key] = value
        elif not _agree(first, value):
            what = "the optimizer's attribute" if where is None else f"group {where}'s"
            raise UnsupportedOptimizerError(
                f"{adapter.supports()} made of {what} {key!r} {first!r} in one batch and "
                f"{value!r} in another, of the same update: it depends on all parameters, so "
                f"this optimizer cannot be updated batch by batch. Parameters of this update "
                f"may be wrong; go on from a checkpoint, without swapping."
            )


def _native_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class without swapping."""
    if isinstance(optimizer, TorchSwapOptimizer):
        return optimizer._swap_base
    return type(optimizer)


def _bare_step(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The class's step without the wrapper that calls hooks."""
    step: Any = kind.step
    while vars(step).get("hooked", False):
        step = step.__wrapped__
    bare: Callable[[Optimizer], object] = step
    return bare


def _take_entry(
    member: Member, given: Mapping[str, Any], entries: OptimizerState, state: OptimizerState
) -> None:
    """Take over what a stand-in made of a parameter's entry in ``optimizer.state``."""
    made = entries.get(member.param)
    if made is None:
        return
    entry = state.setdefault(member.param, {})
    for key, value in made.items():
        if value is not given.get(key, _MISSING):
            place = member.places.get(key)
            entry[key] = value if place is None else place.take(value)
    for key in given.keys() - made.keys():
        entry.pop(key, None)


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], but: set[str]
) -> dict[str, object]:
    return {
        key: value
        for key, value in after.items()
        if key not in but and value is not before.get(key, _MISSING)
    }


def _agree(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Comparing tensors of a device would wait for it.
        return one.device.type != "cpu" or torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)
