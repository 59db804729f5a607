# SPDX-License-Identifier: Apache-2.0
"""One optimizer's swapping: from a call of ``step()`` to batches through a device."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, final

import torch

from swap_core import (
    HostMemory,
    Ledger,
    SwapOptimizerConfig,
    SwapReport,
    Tracer,
    available_host_memory,
)
from swap_torch.adapter import TorchStep, TorchSwapAdapter
from swap_torch.ahead import BackwardTrigger
from swap_torch.auto import AutoOffload
from swap_torch.budget import Budget
from swap_torch.device import AnyTorchDevice
from swap_torch.eligibility import Eligibility
from swap_torch.in_backward import BackwardUpdates
from swap_torch.loading import Loader
from swap_torch.phases import Phase, Phases
from swap_torch.plan import Plan, same_groups
from swap_torch.planner import Planner
from swap_torch.reading import LoadedEntries
from swap_torch.runner import Runner
from swap_torch.selection import OptimizerState, Selection
from swap_torch.snapshot import Snapshots
from swap_torch.states import StateTable

__all__ = ["SwapEngine"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _outside_of_autograd(function: _Function) -> _Function:
    """Record no gradients, and make ordinary tensors also in inference mode.

    Rollouts run in it, and what is made there cannot be updated in place outside.
    """
    outside: _Function = torch.inference_mode(False)(torch.no_grad()(function))
    return outside


_PLANS_KEPT = 8
"""Sets of active parameters that come back, such as the experts of a mixture, keep their plans."""


@final
class SwapEngine:
    """Owns everything that swapping adds to an optimizer.

    Args:
        adapter: The optimizer's adapter, already validated.
        config: How to swap.
        device: Given explicitly by the user, or None.
        phase: Where states are that the optimizer has already.
    """

    def __init__(
        self,
        adapter: TorchSwapAdapter,
        config: SwapOptimizerConfig,
        device: AnyTorchDevice | None,
        phase: Phase = Phase.SWAPPED,
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.device = device
        self.ledger = Ledger()
        self._auto = AutoOffload() if config.offload == "auto" else None
        eligibility = Eligibility(config, device, adapter.wrapper_states)
        self._selection = Selection(adapter, eligibility, Budget(config.device_budget))
        self._table = StateTable(adapter, self._selection, self.ledger)
        self._snapshots = Snapshots(self._table)
        self._phases = Phases(adapter, self._table, phase)
        self._planner = Planner(adapter, self._table, config, self.ledger)
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._params: list[list[torch.Tensor]] = []
        """The parameters of each group, as of the newest plan."""
        self._runner = Runner(adapter, zigzag=config.zigzag)
        self._looked_at = False
        self._newest: Plan | None = None
        """The plan of the latest update, if it was made anew or not."""
        self._trigger = BackwardTrigger(self.begin_early) if config.prefetch == "backward" else None
        self._in_backward = (
            BackwardUpdates(
                adapter,
                self._runner,
                trusted=config.overlap_backward == "trusted",
                may_begin=self._may_begin,
            )
            if config.overlap_backward
            else None
        )
        self.tracer: Tracer | None = None

    @property
    def packed(self) -> bool:
        """Whether states move through arenas."""
        return self._planner.packed

    @_outside_of_autograd
    def step(self, state: OptimizerState) -> None:
        """Update every parameter that has a gradient. Does not block the host.

        Args:
            state: ``optimizer.state``, without waiting for it.
        """
        if self.tracer is None:
            self._step(state)
        else:
            with self.tracer.update():
                self._step(state)

    def _step(self, state: OptimizerState) -> None:
        if self._in_backward is not None:
            self._in_backward.check()
        step = self.adapter.prepare_step()
        if step.grads:
            whole = step.masks
            if self._in_backward is not None:
                step = self._in_backward.rest_of(step, state)
            self._phases.resume(state)
            self._follow_moves(state)
            if step.grads:
                plan = self._plan(step, state)
                plan.localize(step, self.adapter)
                self._runner.run(step, plan)
            if step.masks == whole:
                self._expect_another(plan, step)
            elif self._in_backward is not None:
                self._in_backward.give_up()
        self.adapter.finish_step(step)
        if self._auto is not None:
            self._decide(self._auto, state)

    def _decide(self, auto: AutoOffload, state: OptimizerState) -> None:
        """``offload="auto"``: once, let states stay for which there was always room."""
        if not self._runner.latest or not auto.update_done():
            return
        sizes = self._selection.bytes_that_could_swap()
        stay = auto.decide([lane.device for lane in self._runner.latest], sizes)
        if not stay:
            return
        self._selection.budget.keep(sizes, stay)
        self._forget_plans()
        try:
            self._phases.let_stay(stay, state)
        except torch.OutOfMemoryError:
            self._selection.budget.keep(sizes, set())
            auto.found_no_room()

    def _forget_plans(self) -> None:
        """Let go of plans: they hold states, and memory of states that are held is not reused."""
        self.settle()
        self._plans.clear()
        self._forget_newest()

    def _forget_newest(self) -> None:
        self._newest = None
        self._runner.latest = ()
        if self._in_backward is not None:
            self._in_backward.forget_plan()

    def _expect_another(self, plan: Plan, step: TorchStep) -> None:
        """After an update: prepare for what is done in the next backward pass."""
        if self._trigger is not None:
            self._trigger.update_done(plan.first_to_load())
        if self._in_backward is not None:
            self._in_backward.follow(plan, step)
        self._newest = plan

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def begin_early(self) -> None:
        """In the backward pass: queue the first loads of the next update."""
        plan = self._newest
        if plan is not None and self._runner.open in (None, plan) and self._may_begin(plan, None):
            self._runner.begin(plan)

    def gradients_dropped(self) -> None:
        """Give up what was begun for an update that will not be."""
        if self._trigger is not None:
            self._trigger.gradients_dropped()
        if self._in_backward is not None:
            self._in_backward.gradients_dropped()
        self._runner.give_up()

    def group_added(self) -> None:
        """Before another param group: refuse it, or give up what was begun without it."""
        if self._in_backward is not None:
            self._in_backward.group_added()

    def _may_begin(self, plan: Plan, step: TorchStep | None) -> bool:
        """Whether an update by ``plan`` may begin before ``step()``: nothing was changed."""
        if self._phases.phase is not Phase.SWAPPED or not plan.lanes:
            return False
        state = vars(self.adapter.optimizer)["state"]
        self._follow_moves(state)
        return plan.holds_states_of(state) and (step is None or plan.fits(step, state))

    def _follow_moves(self, state: OptimizerState) -> None:
        """Before an update: find what was done to states since somebody looked at them."""
        if self._looked_at:
            self._table.notice_moves(state)
            self._snapshots.leave(state)
            self._looked_at = False

    def settle(self) -> None:
        """Block the host until the host states are current. Nothing to do twice."""
        self._runner.settle()

    def show(self) -> None:
        """Settle, and remember that somebody looks at the states, and may move them."""
        self.settle()
        self._looked_at = True

    @_outside_of_autograd
    def adopt(self, state: OptimizerState) -> None:
        """Move states that exist and swap, but are not in their host memory, there.

        For states from before wrapping and from ``load_state_dict``.
        """
        self._forget_plans()
        self._table.adopt(state)
        self._phases.park(state)

    @_outside_of_autograd
    def snapshot(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Make of a native state dict one that later updates do not change.

        Args:
            state_dict: Made when all stores were done; not changed.
        """
        return self._snapshots.take(state_dict)

    @_outside_of_autograd
    def load(self, entries: LoadedEntries, present: list[OptimizerState]) -> OptimizerState:
        """Make a new ``optimizer.state``; see :meth:`Loader.load`."""
        if self._in_backward is not None:
            self._in_backward.refuse_while_updated("load_state_dict")
        self._forget_plans()
        return Loader(self._table).load(entries, present)

    @property
    def phase(self) -> Phase:
        """Where states are between updates."""
        return self._phases.phase

    @_outside_of_autograd
    def enter(self, phase: Phase, state: OptimizerState) -> None:
        """Bring all states to where they are in ``phase``; see :meth:`Phases.enter`."""
        self._forget_plans()
        self._table.notice_moves(state)
        self._phases.enter(phase, state)

    def host_memory(self) -> HostMemory:
        """Tell what host memory all states need, once they exist, and what there is."""
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return HostMemory(
            needed_bytes=self._table.host_bytes_needed(),
            held_bytes=self.ledger.host_bytes,
            processes=int(processes) if processes.isdigit() else 1,
            available_bytes=available_host_memory(),
        )

    def report(self, state: OptimizerState) -> SwapReport:
        """Describe states, latest batches and counters. Blocks until stores are done."""
        self.settle()
        batches = [batch for lane in self._runner.latest for batch in lane.batches]
        return SwapReport(
            optimizer=self.adapter.supports(),
            packed=self.packed,
            states=tuple(self._table.report(state)),
            batches=len(batches),
            batch_bytes=tuple(batch.nbytes for batch in batches),
            pinned=self._table.homes.pinned,
            ledger=replace(self.ledger),
            decision=self._auto.decision if self._auto is not None else "",
            last_step=self._runner.times(packed=self.packed),
        )

    def watch(self, tracer: Tracer | None) -> None:
        """Let ``tracer`` see all plans from now on; None: no longer. Blocks until stores are done.

        A tracer takes itself off the pipelines that it was attached to.
        """
        self.tracer = tracer
        if tracer is None:
            self.settle()
        else:
            for plan in self._plans.values():
                self._attach(tracer, plan)

    @staticmethod
    def _attach(tracer: Tracer, plan: Plan) -> None:
        for lane in plan.lanes:
            tracer.attach(lane.pipeline, lane.batches, str(lane.device.torch_device))

    # One step.

    def _plan(self, step: TorchStep, state: OptimizerState) -> Plan:
        key = (step.masks, step.options)
        plan = self._plans.get(key)
        if plan is not None and plan.fits(step, state):
            self._plans.move_to_end(key)
            return plan
        # A stale plan holds states, and the memory of a state that is held is not used again.
        del plan
        plan = self._plans[key] = self._new_plan(step, state)
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)
        return plan

    def _new_plan(self, step: TorchStep, state: OptimizerState) -> Plan:
        """Plan anew: first use, or something was changed from outside between updates."""
        self.adapter.validate(self.config)
        self.settle()
        self._forget_newest()
        params = [list(members) for members in step.params]
        replaced = not same_groups(params, self._params)
        if replaced or not all(plan.holds_states_of(state) for plan in self._plans.values()):
            self._plans.clear()
            self._planner.forget()
        if replaced:
            self._table.part_with_all_but(p for members in params for p in members)
            self._params = params
        self._table.admit(self.adapter.iter_update_units(step), state)
        plan = self._planner.build(step, state)
        if self.tracer is not None:
            self._attach(self.tracer, plan)
        return plan
