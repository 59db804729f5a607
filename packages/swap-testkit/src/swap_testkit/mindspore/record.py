# SPDX-License-Identifier: Apache-2.0
"""Run a trainer and write down what must be the same, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from swap_core import SwapOptimizerConfig, find_adapter
from swap_mindspore import (
    HostDevice,
    MindSporeSwapAdapter,
    MindSporeSwapOptimizer,
    swap_optimizer,
)
from swap_testkit.alignment import Memory, RunRecord
from swap_testkit.array import Array
from swap_testkit.mindspore.trainer import Trainer

__all__ = ["Wrap", "array_of", "record_run", "wrapper"]

Wrap = Callable[[nn.Optimizer], nn.Optimizer]
"""Turns a native optimizer into the one to be compared with it."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def wrapper(config: SwapOptimizerConfig) -> Wrap:
    """The wrap that this kit is about; on the CPU, CPU tensors play the device's part."""
    on_cpu = ms.get_context("device_target") == "CPU"
    return partial(
        swap_optimizer, config=config, device=HostDevice(poison=True) if on_cpu else None
    )


def record_run(
    trainer: Trainer, steps: int, *, wrap: Wrap | None = None, watch: bool = False
) -> RunRecord:
    """Train and record.

    Args:
        trainer: Fresh from its seed.
        steps: How many steps.
        wrap: Applied to the optimizer before the first step; None: the native run.
        watch: Also fingerprint every tensor after every step.
    """
    optimizer = trainer.optimizer
    if wrap is not None and wrap(optimizer) is not optimizer:
        raise TypeError("record_run: wrap must change the optimizer in place and return it")
    record = RunRecord()
    losses = []
    for step in range(steps):
        losses.append(trainer.train_step(step))
        if watch:
            digests = {name: array_of(value).digest() for name, value in _tensors(optimizer)}
            record.digests.append(digests)
    record.losses = [float(loss.asnumpy()) for loss in losses]
    record.arrays = {name: array_of(value) for name, value in _tensors(optimizer)}
    record.parameters = [param.name for param in optimizer.parameters]
    record.memory = _memory(optimizer)
    record.step_seconds = trainer.update_seconds
    return record


def array_of(value: Tensor) -> Array:
    """The values of a tensor or a counter."""
    name = str(value.dtype).lower()
    # numpy has no bfloat16. asnumpy() shows the tensor's own memory, which the next step changes.
    bits = value.view(ms.int16) if value.dtype == ms.bfloat16 else value
    dense = np.array(bits.asnumpy(), order="C")
    return Array(name, dense.view(_UNSIGNED[dense.itemsize]))


def _tensors(optimizer: nn.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Parameters, states and counters, by name."""
    everything = {param.name: param for param in optimizer.parameters}
    everything |= {param.name: param for param in optimizer.get_parameters()}
    yield from everything.items()


def _memory(optimizer: nn.Optimizer) -> Memory:
    """Bytes of states; those of a native optimizer are on the device all the time."""
    if isinstance(optimizer, MindSporeSwapOptimizer):
        report = optimizer.swap_report()
        idle = report.resident_bytes + report.idle_device_bytes
        return Memory(idle, report.resident_bytes + report.peak_device_bytes, report.host_bytes)
    adapter = find_adapter(optimizer, "mindspore")(optimizer)  # type: ignore[call-arg]
    assert isinstance(adapter, MindSporeSwapAdapter)  # the entry-point group's promise
    existing = (s for states in adapter.states().values() for s in states if s is not None)
    held = sum(state.nbytes for state in existing)
    return Memory(held, held, 0)
