# SPDX-License-Identifier: Apache-2.0
"""One optimizer's swapping: from a call of the optimizer to batches through a device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

from mindspore import Tensor, _no_grad

from swap_core import Ledger, StepTimes, SwapOptimizerConfig, SwapReport, Tracer, step_times
from swap_mindspore.adapter import MindSporeSwapAdapter
from swap_mindspore.device import AnyMindSporeDevice
from swap_mindspore.eligibility import default_device
from swap_mindspore.homes import Homes, PerTensorHomes
from swap_mindspore.packed_homes import PackedHomes
from swap_mindspore.plan import Lane, Plan, make_plan
from swap_mindspore.states import StateTable

__all__ = ["SwapEngine"]


@final
class SwapEngine:
    """Owns everything that swapping adds to an optimizer. Making one moves states to the host.

    A MindSpore optimizer has its parameters and states for life, so what moves and what is computed
    is planned here, and again only if other parameters are to be updated than before.

    Args:
        adapter: The optimizer's adapter, already validated.
        config: How to swap.
        device: Given explicitly by the user, or None.
    """

    def __init__(
        self,
        adapter: MindSporeSwapAdapter,
        config: SwapOptimizerConfig,
        device: AnyMindSporeDevice | None,
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.device = device if device is not None else default_device()
        self.ledger = Ledger()
        packed = config.packed_swap
        self.packed = adapter.packed_by_default if packed is None else packed
        self._table = StateTable(adapter, config, self.device)
        self._plan = self._planned()
        self._timed = False
        self._tracer: Tracer | None = None

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update every parameter.

        Blocks the host until the states are stored: anyone may hold and read their Parameters.

        Args:
            gradients: One for each parameter, on the device.
        """
        step = self.adapter.prepare_step(gradients)
        if self._tracer is not None:
            self._tracer.begin_update()
        with _no_grad():
            self.adopt()
            if self._plan.signature != self.adapter.signature():
                self._plan = self._planned()
                self._attach()
            plan, lane = self._plan, self._plan.lane
            self._timed = False
            if lane is not None and self.device is not None:
                lane.pipeline.run(
                    lane.batches,
                    lambda index: self.adapter.step_batch(step, lane.calls[index]),
                    lambda: self.adapter.step_batch(step, plan.staying),
                )
                lane.pipeline.device.synchronize(lane.batches[-1].stored)
                self._timed = True
            else:
                self.adapter.step_batch(step, plan.staying)
            self.adapter.finish_step(step)
        if self._tracer is not None:
            self._tracer.end_update()

    @contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """Write what updates inside ``with`` do to ``file``, also if they raise.

        Raises:
            OSError: the file cannot be written; nothing was run.
            RuntimeError: the optimizer is being traced already.
        """
        if self._tracer is not None:
            raise RuntimeError(
                "trace: this optimizer is being traced already; end that trace first, or let it "
                "last longer."
            )
        self._tracer = tracer = Tracer(file)
        try:
            self._attach()
            yield
        finally:
            self._tracer = None
            tracer.finish()

    def _attach(self) -> None:
        """Let the tracer, if there is one, watch the plan."""
        lane = self._plan.lane
        if self._tracer is not None and lane is not None and self.device is not None:
            self._tracer.attach(lane.pipeline, lane.batches, self.device.target)

    def adopt(self) -> None:
        """Take over states that were loaded or set from outside."""
        self._table.adopt()

    @contextmanager
    def lent(self, keys: Collection[str]) -> Iterator[None]:
        """Have the swapped states of these keys on the device, and keep what is done to them."""
        with _no_grad():
            self.adopt()
            try:
                if self.device is not None:
                    self._table.lend(keys, self.device)
                yield
            finally:
                self.adopt()

    def warn_if_nothing_swaps(self) -> None:
        """Warn when no state can ever swap, and say why."""
        report = self.report()
        if any(state.stays is None for state in report.states):
            return
        told = "; ".join(
            f"{count} because {reason.value}" for reason, count in report.stay_counts().items()
        )
        warnings.warn(
            f"swap_optimizer: none of the {len(report.states)} states of this "
            f"{self.adapter.supports()} can swap: {told}. The optimizer works as before and saves "
            f"no memory.",
            UserWarning,
            stacklevel=3,
        )

    def report(self) -> SwapReport:
        """Describe states, batches and counters."""
        batches = self._plan.lane.batches if self._plan.lane is not None else ()
        return SwapReport(
            optimizer=self.adapter.supports(),
            packed=self.packed,
            states=tuple(self._table.report()),
            batches=len(batches) if self.ledger.updates else 0,
            batch_bytes=tuple(batch.nbytes for batch in batches),
            pinned=self.device is not None and self.device.pinned,
            ledger=replace(self.ledger),
            last_step=self._times(self._plan.lane) if self._timed else None,
        )

    def _planned(self) -> Plan:
        device, homes = self.device, None
        if device is not None:
            homes = self._homes(device)
        return make_plan(
            self.adapter, self._table, self.config.swap_times, homes, device, self.ledger
        )

    def _homes(self, device: AnyMindSporeDevice) -> Homes:
        if self.packed:
            return PackedHomes(device, self.config.staging_buffers)
        return PerTensorHomes(device)

    def _times(self, lane: Lane | None) -> StepTimes:
        device = self.device
        assert device is not None  # an update went through it
        assert lane is not None

        def seconds(end: object) -> float:
            return device.elapsed(lane.batches[0].restored, end)

        return step_times(
            [seconds(batch.loaded) for batch in lane.batches],
            [seconds(batch.updated) for batch in lane.batches],
            [seconds(batch.stored) for batch in lane.batches],
            ring=lane.ring,
            update_after_store=not self.packed,
            meanwhile=seconds(lane.pipeline.meanwhile_done),
        )
