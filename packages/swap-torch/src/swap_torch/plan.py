# SPDX-License-Identifier: Apache-2.0
"""The plan of an update: what moves, through what, and what is computed with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch

from swap_core import Batch, Pipeline
from swap_torch.adapter import ActiveGroup, TorchStep, TorchSwapAdapter, UpdateCall
from swap_torch.device import AnyTorchDevice, DeviceMemory, Transfer
from swap_torch.selection import OptimizerState
from swap_torch.sharding import local_gradients, locals_of, placed_alike

__all__ = ["Lane", "Plan", "TorchBatch", "TorchPipeline", "same_groups", "tensors_in"]

TorchBatch: TypeAlias = Batch[Any, DeviceMemory, Transfer]
TorchPipeline: TypeAlias = Pipeline[Any, Any, DeviceMemory, Transfer]


@dataclass(frozen=True, slots=True)
class Lane:
    """What runs through one device."""

    device: AnyTorchDevice
    pipeline: TorchPipeline
    batches: tuple[TorchBatch, ...]
    calls: tuple[tuple[UpdateCall, ...], ...]
    """For each batch, the calls that update it."""
    shown: tuple[tuple[torch.Tensor, ...], ...]
    """For each batch, what ``optimizer.state`` shows of its states."""
    ring: int
    """A load waits for the store of the batch this many before it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An update of certain parameters, with what must still be true for it to fit.

    Made once and used in every step that it fits: nothing in it is allocated or bound again.
    """

    group_params: tuple[tuple[torch.Tensor, ...], ...]
    """All parameters of each group, with gradient or without."""
    active: tuple[torch.Tensor, ...]
    """Those with a gradient."""
    groups: tuple[ActiveGroup, ...]
    """Where the parameters of each group are in ``active``, of groups that have any there."""
    locals: tuple[torch.Tensor, ...]
    """Their local tensors, if any of them is sharded; else empty."""
    entries: tuple[dict[str, Any] | None, ...]
    """``optimizer.state[param]`` of each; None where there is none."""
    values: tuple[Any, ...]
    """All values in ``entries``, in order; only tensors if ``tensors_only``."""
    staying: tuple[UpdateCall, ...]
    """Updates that need no swapped state."""
    lanes: tuple[Lane, ...]
    tensors_only: bool = False
    """Whether entries may be missing, and numbers in them be replaced in each step: so it is where
    an optimizer's own step runs."""

    def fits(self, step: TorchStep, state: OptimizerState) -> bool:
        """Tell whether parameters, shards and states are the very objects that were planned."""
        return (
            self.has_parameters_of(step)
            and (not self.locals or _same(locals_of(self.active), self.locals))
            and self.holds_states_of(state)
        )

    def first_to_load(self) -> torch.Tensor | None:
        """A parameter whose gradient comes when that of the first batch comes; None: there is none.

        Backward passes come to the last of them first.
        """
        if not self.lanes:
            return None
        calls = self.lanes[0].calls[0]
        places = [call.grads for call in calls][-1]
        last = places.stop - 1 if isinstance(places, slice) else places[-1]
        param = self.active[last]
        return param if param.requires_grad else None

    def holds_states_of(self, state: OptimizerState) -> bool:
        """Tell whether the states are the very objects that were planned."""
        return self._has_entries_of(state) and _same(
            tensors_in(self.entries)
            if self.tensors_only
            else [*chain.from_iterable(map(dict.values, self.entries))],  # type: ignore[arg-type]
            self.values,
        )

    def _has_entries_of(self, state: OptimizerState) -> bool:
        # Mostly all parameters are active, in the order in which their states were born; that is
        # seen without hashing a parameter, which is a call into Python each.
        if _same([*state.keys()], self.active) and _same([*state.values()], self.entries):
            return True
        return _same(list(map(state.get, self.active)), self.entries)

    def has_parameters_of(self, step: TorchStep) -> bool:
        """Tell whether the optimizer's parameters are the very objects that were planned."""
        return same_groups(step.params, self.group_params)

    def localize(self, step: TorchStep, adapter: TorchSwapAdapter) -> None:
        """Replace the step's gradients by local ones with their parameters' placement."""
        if not self.locals:
            return
        if placed_alike(self.active, step.grads):
            step.grads = locals_of(step.grads)
            return
        for group in self.groups:
            params, grads = self.active[group.members], step.grads[group.members]
            step.grads[group.members] = adapter.before_reduction(step, group, params, grads)
        step.grads = local_gradients(self.active, step.grads)


def tensors_in(entries: Iterable[dict[str, Any] | None]) -> list[torch.Tensor]:
    """All tensors in some entries of ``optimizer.state``, in order."""
    values = chain.from_iterable(entry.values() for entry in entries if entry is not None)
    return [value for value in values if isinstance(value, torch.Tensor)]


def same_groups(
    found: Sequence[Sequence[torch.Tensor]], known: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Tell whether two lists of groups hold the very same parameters, in the same order."""
    return len(found) == len(known) and all(map(_same, found, known))


def _same(found: Sequence[object], planned: Sequence[object]) -> bool:
    return len(found) == len(planned) and all(map(is_, found, planned))
