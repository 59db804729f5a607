# SPDX-License-Identifier: Apache-2.0
"""Plans under way: what is loaded ahead, kept on a device, or still being stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from swap_core import Residency, StepTimes, step_times
from swap_torch.adapter import TorchStep, TorchSwapAdapter
from swap_torch.device import AnyTorchDevice
from swap_torch.plan import Lane, Plan, TorchBatch
from swap_torch.sharding import local_of

__all__ = ["Runner"]


@final
class Runner:
    """Runs the plans of one optimizer, one at a time.

    Args:
        adapter: Updates batches.
        zigzag: Keep the last batch of an update on the device; it is the first of the next one.
    """

    def __init__(self, adapter: TorchSwapAdapter, *, zigzag: bool) -> None:
        self._adapter = adapter
        self._zigzag = zigzag
        self._open: Plan | None = None
        """The plan whose update began, or that kept a batch."""
        self._ahead: list[tuple[torch.Tensor, tuple[int, int]]] = []
        """Host tensors that were loaded before ``step()``, and their versions then."""
        self._in_flight: dict[torch.device, tuple[AnyTorchDevice, Any]] = {}
        """For each device the event after which all its stores are done."""
        self.latest: tuple[Lane, ...] = ()
        """Of the latest update that was done."""

    @property
    def open(self) -> Plan | None:
        """The plan whose update began, or that has a batch on a device."""
        return self._open

    def begin(self, plan: Plan, *, backwards: bool = False) -> None:
        """Queue the first loads of an update before ``step()``.

        Args:
            plan: Used by a later :meth:`run`, unless the states were changed until then.
            backwards: Last batch first.
        """
        self._make_way(plan)
        self._open = plan
        for lane in plan.lanes:
            order = lane.batches[::-1] if backwards else _order(lane)
            lane.pipeline.begin(order, self._after(lane))
            loaded = order if backwards else order[: lane.ring]
            shown = [tensor for batch in loaded for tensor in lane.shown[batch.index]]
            self._ahead += zip(shown, map(_versions, shown), strict=True)

    def proceed(self, step: TorchStep, lane: Lane) -> None:
        """Update the next batch of a lane whose update began; its gradients are in ``step``."""
        lane.pipeline.proceed(self._updater(step, lane))

    def run(self, step: TorchStep, plan: Plan) -> None:
        """Update everything, or what is left of an update that began."""

        def staying() -> None:
            for call in plan.staying:
                self._adapter.step_batch(step, call)

        self._make_way(plan)
        if not plan.lanes:
            staying()
            return
        if any(_versions(tensor) != before for tensor, before in self._ahead):
            # Somebody wrote into states that were loaded already.
            self.bring_home()
        # Until it is done: events of an update that fails are not all of one update.
        self.latest = ()
        self._open = plan
        meanwhile = staying
        for lane in plan.lanes:
            lane.pipeline.run(
                _order(lane),
                self._updater(step, lane),
                meanwhile,
                after=self._after(lane),
                keep_last=self._zigzag,
                leave_tail=True,
            )
            self._note_stores(lane)
            meanwhile = _nothing
        self._ahead.clear()
        self._open = plan if self._zigzag else None
        self.latest = plan.lanes

    def settle(self) -> None:
        """Block the host until all states are on the host and current. Nothing to do twice."""
        self.bring_home()
        for device, event in self._in_flight.values():
            device.synchronize(event)
        self._in_flight.clear()

    def bring_home(self) -> None:
        """Give up loads and store what is on a device."""
        if self._open is not None:
            for lane in self._open.lanes:
                lane.pipeline.bring_home(lane.batches)
            self._open = None
            self._ahead.clear()

    def times(self, *, packed: bool) -> StepTimes | None:
        """Of the latest update, on its first device; None if there was none, or it failed.

        All stores must be done.
        """
        if not self.latest:
            return None
        lane = self.latest[0]
        passage = lane.pipeline.latest
        if passage is None:
            return None
        batches, first = passage.order, passage.order[0]

        def seconds(end: object) -> float:
            return lane.device.elapsed(first.restored, end)

        # What was loaded before the call of step() was loaded at once, as far as that call sees.
        start = seconds(lane.pipeline.run_called) if passage.early else 0.0

        def since(end: object) -> float:
            return max(0.0, seconds(end) - start)

        updated = [since(batch.updated) for batch in batches]
        loaded = [since(batch.loaded) for batch in batches]
        stored = [since(batch.stored) for batch in passage.stored]
        return step_times(
            [0.0, *loaded[1:]] if passage.resumed else loaded,
            updated,
            [*stored, updated[-1]] if passage.kept else stored,
            ring=lane.ring,
            update_after_store=not packed,
            meanwhile=since(lane.pipeline.meanwhile_done),
            tail_left=passage.tail_left,
        )

    def _make_way(self, plan: Plan) -> None:
        if self._open is not plan:
            self.bring_home()

    def _after(self, lane: Lane) -> Any:  # noqa: ANN401  # a device's own kind of event
        flight = self._in_flight.get(lane.device.torch_device)
        return None if flight is None else flight[1]

    def _note_stores(self, lane: Lane) -> None:
        passage = lane.pipeline.latest
        if passage is not None and passage.stored:
            # The store stream is in order, so this event covers those of earlier steps.
            event = passage.stored[-1].stored
            self._in_flight[lane.device.torch_device] = (lane.device, event)

    def _updater(self, step: TorchStep, lane: Lane) -> Callable[[int], None]:
        def update(index: int) -> None:
            for call in lane.calls[index]:
                self._adapter.step_batch(step, call)

        return update


def _order(lane: Lane) -> Sequence[TorchBatch]:
    """As it began; or backwards if the update before kept the last batch."""
    if lane.pipeline.begun is not None:
        return lane.pipeline.begun.order
    last = lane.batches[-1]
    return lane.batches[::-1] if last.residency is Residency.DEVICE else lane.batches


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    """Change with every write in place, into a DTensor too, of which torch counts the outer one."""
    return tensor._version, local_of(tensor)._version


def _nothing() -> None:
    pass
