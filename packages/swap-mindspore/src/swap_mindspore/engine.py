# SPDX-License-Identifier: Apache-2.0
"""One optimizer's swapping: from a call of the optimizer to batches through a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, final

from mindspore import Tensor, _no_grad

from swap_core import (
    Batch,
    Ledger,
    PerTensorPipeline,
    StepTimes,
    SwapOptimizerConfig,
    SwapReport,
    Tracer,
    partition,
    step_times,
)
from swap_mindspore.adapter import (
    Member,
    MindSporeStep,
    MindSporeSwapAdapter,
    MindSporeUnit,
    UpdateCall,
)
from swap_mindspore.device import AnyMindSporeDevice, DeviceMemory, Transfer
from swap_mindspore.eligibility import default_device
from swap_mindspore.states import StateTable

__all__ = ["SwapEngine"]

_Batch: TypeAlias = Batch[Any, DeviceMemory, Transfer]


@final
class SwapEngine:
    """Owns everything that swapping adds to an optimizer. Making one moves states to the host.

    A MindSpore optimizer has its parameters and states for life, and every update has a gradient
    for each, so what moves and what is computed is planned once, here.

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
        self._table = StateTable(adapter, config, self.device, self.ledger)
        units = [
            replace(unit, slots=tuple(s.slot for s in self._table.swapped_of(unit.adapter_index)))
            for unit in adapter.iter_update_units(MindSporeStep((), None, None))
        ]
        self._staying = self._call(unit for unit in units if not unit.slots)
        swapping = [unit for unit in units if unit.slots]
        parts = partition([unit.nbytes for unit in swapping], config.swap_times)
        self._calls = [self._call(swapping[part.start : part.stop]) for part in parts]
        self._batches = [self._batch(i, call) for i, call in enumerate(self._calls)]
        self._pipeline = PerTensorPipeline(self.device, self.ledger) if self.device else None
        self.ledger.plans_built += 1
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
            self._timed = False
            if self._batches and self._pipeline is not None and self.device is not None:
                self._pipeline.run(
                    self._batches,
                    lambda index: self.adapter.step_batch(step, self._calls[index]),
                    lambda: self.adapter.step_batch(step, self._staying),
                )
                self._pipeline.device.synchronize(self._batches[-1].stored)
                self._timed = True
            else:
                self.adapter.step_batch(step, self._staying)
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
        if self._pipeline is not None and self.device is not None:
            tracer.attach(self._pipeline, self._batches, self.device.target)
        try:
            yield
        finally:
            self._tracer = None
            tracer.finish()

    def adopt(self) -> None:
        """Take over states that were loaded or set from outside."""
        self._table.adopt()

    def warn_if_nothing_swaps(self) -> None:
        """Warn when no state can ever swap, and say why."""
        if self._batches:
            return
        report = self.report()
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
        return SwapReport(
            optimizer=self.adapter.supports(),
            packed=False,
            states=tuple(self._table.report()),
            batches=len(self._batches) if self.ledger.updates else 0,
            batch_bytes=tuple(batch.nbytes for batch in self._batches),
            pinned=self.device is not None and self.device.pinned,
            ledger=replace(self.ledger),
            last_step=self._times() if self._timed else None,
        )

    def _call(self, units: Iterable[MindSporeUnit]) -> UpdateCall:
        indices = [unit.adapter_index for unit in units]
        return UpdateCall(tuple(Member(i, self._table.tensors_of(i)) for i in indices))

    def _batch(self, index: int, call: UpdateCall) -> _Batch:
        states = [s for member in call.members for s in self._table.swapped_of(member.position)]
        sizes = tuple(state.slot.nbytes for state in states)
        device = self.device
        assert device is not None  # without one nothing swaps
        return Batch(
            index=index,
            nbytes=sum(sizes),
            memory=DeviceMemory(tuple(state.device for state in states), sizes),
            transfers=tuple(Transfer(state.device, state.host) for state in states),
            restored=device.create_event(),
            loaded=device.create_event(),
            updated=device.create_event(),
            stored=device.create_event(),
        )

    def _times(self) -> StepTimes:
        device, pipeline, batches = self.device, self._pipeline, self._batches
        assert device is not None  # an update went through it
        assert pipeline is not None

        def seconds(end: object) -> float:
            return device.elapsed(batches[0].restored, end)

        return step_times(
            [seconds(batch.loaded) for batch in batches],
            [seconds(batch.updated) for batch in batches],
            [seconds(batch.stored) for batch in batches],
            ring=2,
            update_after_store=True,
            meanwhile=seconds(pipeline.meanwhile_done),
        )
