# SPDX-License-Identifier: Apache-2.0
"""Updates in the backward pass: a batch is updated as soon as its gradients are final."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any, final
from weakref import WeakMethod, ref

import torch
from torch.utils.hooks import RemovableHandle

from swap_torch.adapter import TorchStep, TorchSwapAdapter, UpdateCall
from swap_torch.ahead import on_gradient
from swap_torch.final_gradients import WHY_GRADIENTS_CHANGE, FinalGradients
from swap_torch.plan import Lane, Plan
from swap_torch.runner import Runner
from swap_torch.selection import OptimizerState
from swap_torch.sharding import locals_of, placed_alike

__all__ = ["BackwardUpdates"]


@final
class BackwardUpdates:
    """Runs an optimizer's updates in the backward pass. See [Note: final gradients].

    Args:
        adapter: Updates batches.
        runner: Runs plans.
        trusted: Do not ask whether gradients change after the backward pass has made them.
        may_begin: Tells whether a plan, used for the step given, still fits; held weakly.
    """

    def __init__(
        self,
        adapter: TorchSwapAdapter,
        runner: Runner,
        *,
        trusted: bool,
        may_begin: Callable[[Plan, TorchStep], bool],
    ) -> None:
        self._adapter = adapter
        self._runner = runner
        self._may_begin = WeakMethod(may_begin)
        self._gradients = FinalGradients(adapter, trusted=trusted)
        self._plan: Plan | None = None
        self._latest: TorchStep | None = None
        """Of the latest update: the next one is expected to be like it."""
        self._lock = Lock()
        """Each device has its own thread in the backward pass."""
        self._handles: dict[torch.Tensor, RemovableHandle] = {}
        self._places: dict[torch.Tensor, tuple[Lane, int]] = {}
        """Lane and batch of each parameter whose states swap."""
        self._missing: dict[tuple[int, int], int] = {}
        """How many gradients each batch still waits for, by lane and batch."""
        self._no_room = False
        """Whether the update could not begin for lack of device memory."""
        self._begun: TorchStep | None = None
        self._hyper: list[dict[str, Any]] = []
        """Options of each group when the update began."""
        self._updated: set[torch.Tensor] = set()
        """Parameters that the update that began has updated."""
        self._skip_told = False

    # The backward pass.

    def follow(self, plan: Plan, step: TorchStep) -> None:
        """After an update: expect the next one to be like it."""
        self._forget()
        self._latest = step
        if plan is self._plan:
            return
        self._plan = plan
        self._places = {
            plan.active[place]: (lane, index)
            for lane in plan.lanes
            for index, calls in enumerate(lane.calls)
            for call in calls
            for place in _places(call)
        }
        for param in [param for param in self._handles if param not in self._places]:
            self._handles.pop(param).remove()
        for param in self._places:
            if param not in self._handles and param.requires_grad:
                self._handles[param] = self._watch(param)

    def _watch(self, param: torch.Tensor) -> RemovableHandle:
        weak = ref(self)  # the parameter must not keep the optimizer's host memory

        def hook(param: torch.Tensor) -> None:
            updates = weak()
            if updates is not None:
                with updates._lock, torch.no_grad():
                    updates._gradient_arrived(param)

        return on_gradient(param, hook)

    def _gradient_arrived(self, param: torch.Tensor) -> None:
        grad, place = param.grad, self._places.get(param)
        if grad is None or place is None:
            return
        if param in self._gradients:
            self._refuse_second(param)
            return
        self._gradients.add(param, grad)
        lane, batch = place
        if self._gradients.proven and (self._begun is not None or self._begin()):
            self._runner.gradient_made(lane)
            self._missing[id(lane), batch] -= 1
            self._advance(lane)

    def _begin(self) -> bool:
        plan, latest, may_begin = self._plan, self._latest, self._may_begin()
        if plan is None or latest is None or may_begin is None or self._updated or self._no_room:
            return False
        groups = self._adapter.optimizer.param_groups
        step = self._adapter.prepare_step()
        step.masks, step.grads = latest.masks, [torch.empty(0, device="cpu")] * len(plan.active)
        if step.options != latest.options or not may_begin(plan, step):
            return False
        if not self._runner.begin(plan, backwards=True):
            self._no_room = True
            return False
        self._begun = step
        self._hyper = [_options(group) for group in groups]
        self._missing = {
            (id(lane), index): sum(len(call.params) for call in calls)
            for lane in plan.lanes
            for index, calls in enumerate(lane.calls)
        }
        return True

    def _advance(self, lane: Lane) -> None:
        """Update the batches whose turn it is and whose gradients are there."""
        step = self._begun
        while step is not None and (passage := lane.pipeline.begun) is not None:
            if passage.position == len(passage.order):
                return
            index = passage.order[passage.position].index
            if self._missing[id(lane), index] or not self._collect(step, lane.calls[index]):
                return
            self._runner.proceed(step, lane)
            assert self._plan is not None  # it began
            places = [place for call in lane.calls[index] for place in _places(call)]
            self._updated.update(self._plan.active[place] for place in places)

    def _collect(self, step: TorchStep, calls: tuple[UpdateCall, ...]) -> bool:
        """Put the gradients of a batch into ``step``; tell whether that could be done now."""
        assert self._plan is not None  # it began
        for call in calls:
            places = _places(call)
            params = [self._plan.active[place] for place in places]
            grads = [grad for param in params if (grad := param.grad) is not None]
            if len(grads) < len(params) or any(grad.is_sparse for grad in grads):
                return False
            if self._plan.locals:
                if not placed_alike(params, grads):
                    return False  # to be reduced first, which step() does
                grads = locals_of(grads)
            for place, grad in zip(places, grads, strict=True):
                step.grads[place] = grad
        return True

    # The step.

    def check(self) -> None:
        """At the beginning of ``step()``: refuse gradients that are not what was seen.

        Raises:
            UnsupportedOptionError: at the first update that could overlap; nothing was changed.
            RuntimeError: at a later one: what was updated in the backward pass stays updated.
        """
        if self._gradients.trusted:
            return
        if not self._gradients.proven:
            self._gradients.prove()
            return
        changed = self._gradients.changed(self._updated)
        now = [_options(group) for group in self._adapter.optimizer.param_groups]
        if not changed and self._begun is not None and now != self._hyper:
            changed = "options of a param group"
        if changed:
            self._runner.bring_home()
            self._forget()
            raise RuntimeError(
                f"overlap_backward: {changed} changed after the backward pass had updated "
                f"parameters with it ({WHY_GRADIENTS_CHANGE}). Those parameters stay updated. Go "
                f"on from a checkpoint, with overlap_backward=False."
            )

    def rest_of(self, step: TorchStep, state: OptimizerState) -> TorchStep:
        """What is left to do in ``step()``.

        Args:
            step: Of all parameters, as :meth:`TorchSwapAdapter.prepare_step` made it.
            state: ``optimizer.state``.

        Returns:
            ``step`` if nothing was done; else what began: as planned, or without the parameters
            that are updated.
        """
        begun, plan = self._begun, self._plan
        if begun is None:
            return step
        if (
            plan is not None
            and all(lane.pipeline.begun for lane in plan.lanes)
            and (step.masks, step.options) == (begun.masks, begun.options)
            and plan.fits(step, state)
        ):
            begun.grads = step.grads
            return begun
        self._runner.bring_home()
        begun.masks, begun.options, begun.grads = step.masks, step.options, step.grads
        return _without(begun, self._updated)

    def gradients_dropped(self) -> None:
        """Give up an update that began: its gradients are gone, without a ``step()``."""
        updated = len(self._updated)
        self.give_up()
        if updated and not self._skip_told:
            self._skip_told = True
            warnings.warn(
                f"overlap_backward: {updated} parameters were updated in the backward pass of a "
                f"step that is now skipped: its gradients are dropped before step(). They stay "
                f"updated, and the others are not. A training that skips steps needs "
                f"overlap_backward=False.",
                RuntimeWarning,
                stacklevel=4,
            )

    def give_up(self) -> None:
        """Store what is on a device, and forget the update that began."""
        if self._begun is not None:
            self._runner.bring_home()
        self._forget()

    def group_added(self) -> None:
        """Before another param group: an update that began was not for it.

        Raises:
            RuntimeError: some parameters are updated; nothing was changed.
        """
        self.refuse_while_updated("add_param_group")
        if self._begun is not None:
            self._runner.bring_home()
            self._begun = None

    def forget_plan(self) -> None:
        """Let go of the plan and the states that it holds; what is updated stays known."""
        self._plan = None
        self._places = {}

    def refuse_while_updated(self, what: str) -> None:
        """Refuse what cannot be done between updates in the backward pass and ``step()``.

        Raises:
            RuntimeError: some parameters are updated; nothing was changed.
        """
        if self._updated:
            raise RuntimeError(
                f"{what} between the backward pass and step(): with overlap_backward, "
                f"{len(self._updated)} parameters are updated already. Call step() first."
            )

    def _forget(self) -> None:
        self._gradients.forget()
        self._no_room = False
        self._begun = None
        self._updated = set()

    def _refuse_second(self, param: torch.Tensor) -> None:
        name = self._gradients.name(param)
        if self._begun is None:
            # Found at step(), before anything is changed: that the gradient is another one.
            return
        self._runner.bring_home()
        self._forget()
        raise RuntimeError(
            f"overlap_backward: a second backward pass before step() adds to {name}, with which "
            f"the first one has updated parameters already. Those stay updated. Go on from a "
            f"checkpoint, with overlap_backward=False."
        )


def _places(call: UpdateCall) -> range | tuple[int, ...]:
    """Where the gradients of a call are among all gradients."""
    return range(call.grads.start, call.grads.stop) if isinstance(call.grads, slice) else call.grads


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group; of a Tensor lr, its value then."""
    return {
        key: (value, value._version) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _without(step: TorchStep, done: set[torch.Tensor]) -> TorchStep:
    """A step without some of its parameters."""
    grads = iter(step.grads)
    masks, kept = [], []
    for members, mask in zip(step.params, step.masks, strict=True):
        left = []
        for param, active in zip(members, mask, strict=True):
            grad = next(grads) if active else None
            wanted = grad is not None and param not in done
            left.append(wanted)
            if wanted and grad is not None:
                kept.append(grad)
        masks.append(tuple(left))
    return replace(step, masks=tuple(masks), grads=kept)
