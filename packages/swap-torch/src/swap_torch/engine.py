# SPDX-License-Identifier: Apache-2.0
"""One optimizer's swapping: from a call of ``step()`` to batches through a device."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch

from swap_core import (
    Ledger,
    StayReason,
    StepTimes,
    SwapOptimizerConfig,
    SwapReport,
    step_times,
)
from swap_torch.adapter import TorchStep, TorchSwapAdapter
from swap_torch.device import AnyTorchDevice
from swap_torch.eligibility import Eligibility
from swap_torch.loading import Loader
from swap_torch.phases import Phase, Phases
from swap_torch.plan import Lane, Plan, same_groups
from swap_torch.planner import Planner
from swap_torch.reading import LoadedEntries
from swap_torch.snapshot import Snapshots
from swap_torch.states import OptimizerState, StateTable

__all__ = ["SwapEngine"]

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
        self._table = StateTable(adapter, Eligibility(config, device), self.ledger)
        self._snapshots = Snapshots(self._table)
        self._phases = Phases(adapter, self._table, phase)
        self._planner = Planner(adapter, self._table, config, self.ledger)
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._params: list[list[torch.Tensor]] = []
        """The parameters of each group, as of the newest plan."""
        self._latest: tuple[Lane, ...] = ()
        self._looked_at = False
        self._in_flight: dict[torch.device, tuple[AnyTorchDevice, Any]] = {}

    @property
    def packed(self) -> bool:
        """Whether states move through arenas."""
        return self._planner.packed

    @torch.no_grad()
    def step(self, state: OptimizerState) -> None:
        """Update every parameter that has a gradient. Does not block the host.

        Args:
            state: ``optimizer.state``, without waiting for it.
        """
        step = self.adapter.prepare_step()
        if step.grads:
            self._phases.resume(state)
            if self._looked_at:
                self._table.notice_moves(state)
                self._snapshots.leave(state)
                self._looked_at = False
            plan = self._plan(step, state)
            plan.localize(step, self.adapter)
            self._run(step, plan)
        self.adapter.finish_step(step)

    def settle(self) -> None:
        """Block the host until the host states are current. Nothing to do twice."""
        for device, event in self._in_flight.values():
            device.synchronize(event)
        self._in_flight.clear()

    def show(self) -> None:
        """Settle, and remember that somebody looks at the states, and may move them."""
        self.settle()
        self._looked_at = True

    @torch.no_grad()
    def adopt(self, state: OptimizerState) -> None:
        """Move states that exist and swap, but are not in their host memory, there.

        For states from before wrapping and from ``load_state_dict``.
        """
        self.settle()
        self._plans.clear()
        self._table.adopt(state)
        self._phases.park(state)

    @torch.no_grad()
    def snapshot(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Make of a native state dict one that later updates do not change.

        Args:
            state_dict: Made when all stores were done; not changed.
        """
        return self._snapshots.take(state_dict)

    @torch.no_grad()
    def load(self, entries: LoadedEntries, present: list[OptimizerState]) -> OptimizerState:
        """Make a new ``optimizer.state``; see :meth:`Loader.load`."""
        self.settle()
        # Plans hold states; memory of states that are held is not used again.
        self._plans.clear()
        self._latest = ()
        return Loader(self._table).load(entries, present)

    @property
    def phase(self) -> Phase:
        """Where states are between updates."""
        return self._phases.phase

    @torch.no_grad()
    def enter(self, phase: Phase, state: OptimizerState) -> None:
        """Bring all states to where they are in ``phase``; see :meth:`Phases.enter`."""
        self.settle()
        self._plans.clear()
        self._latest = ()
        self._phases.enter(phase, state)

    def warn_if_nothing_swaps(self) -> None:
        """Warn, once, when no state of any parameter can ever swap, and say why."""
        report = self.report(self.adapter.optimizer.state)
        reasons = report.stay_counts()
        may_swap = {None, StayReason.NOT_MATERIALISED}
        if not report.states or any(state.stays in may_swap for state in report.states):
            return
        told = "; ".join(f"{count} because {reason.value}" for reason, count in reasons.items())
        warnings.warn(
            f"swap_optimizer: none of the {len(report.states)} states of this "
            f"{self.adapter.supports()} can swap: {told}. The optimizer works as before and saves "
            f"no memory.",
            UserWarning,
            stacklevel=3,
        )

    def report(self, state: OptimizerState) -> SwapReport:
        """Describe states, latest batches and counters. Blocks until stores are done."""
        self.settle()
        batches = [batch for lane in self._latest for batch in lane.batches]
        return SwapReport(
            optimizer=self.adapter.supports(),
            packed=self.packed,
            states=tuple(self._table.report(state)),
            batches=len(batches),
            batch_bytes=tuple(batch.nbytes for batch in batches),
            pinned=self._table.homes.pinned,
            ledger=replace(self.ledger),
            last_step=self._times(self._latest[0]) if self._latest else None,
        )

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
        self._latest = ()
        params = [list(members) for members in step.params]
        replaced = not same_groups(params, self._params)
        if replaced or not all(plan.holds_states_of(state) for plan in self._plans.values()):
            self._plans.clear()
            self._planner.forget()
        if replaced:
            self._table.part_with_all_but(p for members in params for p in members)
            self._params = params
        self._table.admit(self.adapter.iter_update_units(step), state)
        return self._planner.build(step, state)

    def _run(self, step: TorchStep, plan: Plan) -> None:
        def staying() -> None:
            for call in plan.staying:
                self.adapter.step_batch(step, call)

        if not plan.lanes:
            staying()
            return
        # Until it is done: events of an update that fails are not all of one update.
        self._latest = ()
        meanwhile = staying
        for lane in plan.lanes:
            lane.pipeline.run(lane.batches, self._updater(step, lane), meanwhile)
            # The store stream is in order, so this event covers those of earlier steps.
            self._in_flight[lane.device.torch_device] = (lane.device, lane.batches[-1].stored)
            meanwhile = _nothing
        self._latest = plan.lanes

    def _updater(self, step: TorchStep, lane: Lane) -> Callable[[int], None]:
        def update(index: int) -> None:
            for call in lane.calls[index]:
                self.adapter.step_batch(step, call)

        return update

    def _times(self, lane: Lane) -> StepTimes:
        def seconds(end: object) -> float:
            return lane.device.elapsed(lane.batches[0].restored, end)

        return step_times(
            [seconds(batch.loaded) for batch in lane.batches],
            [seconds(batch.updated) for batch in lane.batches],
            [seconds(batch.stored) for batch in lane.batches],
            ring=lane.ring,
            update_after_store=not self.packed,
            meanwhile=seconds(lane.pipeline.meanwhile_done),
        )


def _nothing() -> None:
    pass
