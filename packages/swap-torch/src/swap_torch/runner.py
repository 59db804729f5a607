# SPDX-License-Identifier: Apache-2.0
"""Plans under way: what is loaded ahead, kept on a device, or still being stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from swap_core import Residency, StepTimes, SwapDevice, step_times
from swap_torch.adapter import TorchStep, TorchSwapAdapter
from swap_torch.device import AnyTorchDevice
from swap_torch.gradients import versions_of
from swap_torch.plan import Lane, Plan, TorchBatch
from swap_torch.profiling import in_ranges, profiler_runs, update_in_range

__all__ = ["Runner"]

_log = logging.getLogger("swap_torch")


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
        self._main: dict[torch.device, Any] = {}
        """For each device the stream on which the latest update ran."""
        self._aside = False
        """Whether the update that began runs on the devices' update streams."""
        self._marks: dict[torch.device, Any] = {}
        """An event for each device, for waits between streams."""
        self._in_flight: dict[torch.device, tuple[SwapDevice[Any, Any, Any, Any], Any]] = {}
        """For each device the event after which all its stores are done."""
        self.latest: tuple[Lane, ...] = ()
        """Of the latest update that was done."""

    @property
    def open(self) -> Plan | None:
        """The plan whose update began, or that has a batch on a device."""
        return self._open

    def begin(self, plan: Plan, *, backwards: bool = False) -> bool:
        """Queue the first loads of an update before ``step()``.

        Args:
            plan: Used by a later :meth:`run`, unless the states were changed until then.
            backwards: Last batch first.

        Returns:
            Whether there was device memory for it. If not, nothing began: in ``step()``, when
            activations are gone, there may be.
        """
        try:
            self._begin(plan, backwards)
        except torch.OutOfMemoryError as error:
            self.bring_home()
            _log.info("no room for an update to begin before step(): %s", error)
            return False
        return True

    def _begin(self, plan: Plan, backwards: bool) -> None:
        self._make_way(plan)
        self._open, self._aside = plan, backwards
        for lane in plan.lanes:
            order = lane.batches[::-1] if backwards else _order(lane)
            if backwards:
                self._follow(lane.device, self._main[lane.device.torch_device])
            with lane.device.as_current(self._stream(lane.device)), _ranges(lane):
                lane.pipeline.begin(order, self._after(lane))
            loaded = order if backwards else order[: lane.ring]
            shown = [tensor for batch in loaded for tensor in lane.shown[batch.index]]
            self._ahead += zip(shown, map(versions_of, shown), strict=True)

    def gradient_made(self, lane: Lane) -> None:
        """In the backward pass: a gradient is there, on the current stream."""
        current = lane.device.compute_stream()
        if current != self._main[lane.device.torch_device]:
            self._follow(lane.device, current)

    def proceed(self, step: TorchStep, lane: Lane) -> None:
        """Update the next batch of a lane whose update began; its gradients are in ``step``."""
        self._follow(lane.device, self._main[lane.device.torch_device])
        with lane.device.as_current(lane.device.update_stream), _ranges(lane):
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
        if self._is_stale():
            self.bring_home()
        # Until it is done: events of an update that fails are not all of one update.
        self.latest = ()
        self._open = plan
        meanwhile = staying
        # Of all at once: if the first one fails, what is on the others is brought home too.
        self._main.update(
            (lane.device.torch_device, lane.device.compute_stream()) for lane in plan.lanes
        )
        for lane in plan.lanes:
            device, main = lane.device, self._main[lane.device.torch_device]
            if self._aside:
                self._follow(device, main)
                with device.as_current(device.update_stream):
                    self._run_lane(step, lane, meanwhile)
                self._follow(device, device.update_stream, main)
            else:
                self._run_lane(step, lane, meanwhile)
            meanwhile = _nothing
        self._ahead.clear()
        self._open, self._aside = (plan if self._zigzag else None), False
        self.latest = plan.lanes

    def _is_stale(self) -> bool:
        """Whether what was loaded ahead is not what is to be updated, or not on this stream."""
        if self._aside or not self._ahead or self._open is None:
            return False
        if any(versions_of(tensor) != before for tensor, before in self._ahead):
            return True  # somebody wrote into states that were loaded already
        devices = [lane.device for lane in self._open.lanes]
        return any(device.compute_stream() != self._stream(device) for device in devices)

    def _run_lane(self, step: TorchStep, lane: Lane, meanwhile: Callable[[], None]) -> None:
        with _ranges(lane):
            lane.pipeline.run(
                _order(lane),
                self._updater(step, lane),
                meanwhile,
                after=self._after(lane),
                keep_last=self._zigzag,
                leave_tail=True,
            )
        passage = lane.pipeline.latest
        if passage is not None and passage.stored:
            # The store stream is in order, so this event covers those of earlier steps.
            event = passage.stored[-1].stored
            self._in_flight[lane.device.torch_device] = (lane.pipeline.device, event)

    def settle(self) -> None:
        """Block the host until all states are on the host and current. Nothing to do twice."""
        self.bring_home()
        for device, event in self._in_flight.values():
            device.synchronize(event)
        self._in_flight.clear()

    def give_up(self) -> None:
        """Give up an update that began; a kept batch stays."""
        if self._open is not None and any(lane.pipeline.begun for lane in self._open.lanes):
            self.bring_home()

    def bring_home(self) -> None:
        """Give up loads and store what is on a device."""
        if self._open is not None:
            for lane in self._open.lanes:
                with lane.device.as_current(self._stream(lane.device)):
                    lane.pipeline.bring_home(lane.batches)
            self._open, self._aside = None, False
            self._ahead.clear()

    def times(self, *, packed: bool) -> StepTimes | None:
        """Of the latest update, on its first device; None if there was none, or it failed.

        All stores must be done. An update that began before ``step()`` is waited for, on the host.
        """
        if not self.latest:
            return None
        lane = self.latest[0]
        passage = lane.pipeline.latest
        if passage is None:
            return None
        batches, first = passage.order, passage.order[0]
        if passage.early:
            # Its last store may be done before step() is called, or what that waits for.
            lane.device.synchronize(lane.pipeline.meanwhile_done)

        def seconds(end: object) -> float:
            return lane.device.elapsed(first.restored, end)

        # What was loaded before the call of step() was loaded at once, as far as that call sees.
        start = seconds(lane.pipeline.run_called) if passage.early else 0.0

        def since(end: object) -> float:
            return max(0.0, seconds(end) - start)

        updated = [since(batch.updated) for batch in batches]
        loaded = [since(batch.loaded) for batch in batches[passage.resumed :]]
        stored = [since(batch.stored) for batch in passage.stored]
        return step_times(
            [0.0, *loaded] if passage.resumed else loaded,
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

    def _stream(self, device: AnyTorchDevice) -> Any:  # noqa: ANN401
        """The stream of the update that began."""
        return device.update_stream if self._aside else self._main[device.torch_device]

    def _follow(
        self,
        device: AnyTorchDevice,
        first: Any,  # noqa: ANN401  # a device's own kind of stream
        then: Any = None,  # noqa: ANN401
    ) -> None:
        """Let the update stream, or ``then``, go on after what ``first`` has been given so far."""
        if device.torch_device not in self._marks:
            self._marks[device.torch_device] = device.create_event()
        mark = self._marks[device.torch_device]
        device.record(mark, first)
        device.wait(device.update_stream if then is None else then, mark)

    def _updater(self, step: TorchStep, lane: Lane) -> Callable[[int], None]:
        def update(index: int) -> None:
            for call in lane.calls[index]:
                self._adapter.step_batch(step, call)

        return update_in_range(update) if profiler_runs() else update


_NO_RANGES = nullcontext()


def _ranges(lane: Lane) -> AbstractContextManager[None]:
    """Ranges for a profiler, where one runs."""
    return in_ranges(lane.pipeline, lane.batches) if profiler_runs() else _NO_RANGES


def _order(lane: Lane) -> Sequence[TorchBatch]:
    """As it began; or backwards if the update before kept the last batch."""
    if lane.pipeline.begun is not None:
        return lane.pipeline.begun.order
    last = lane.batches[-1]
    return lane.batches[::-1] if last.residency is Residency.DEVICE else lane.batches


def _nothing() -> None:
    pass
