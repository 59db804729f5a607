# SPDX-License-Identifier: Apache-2.0
"""Run a trainer and write down what must be the same, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TypeGuard

import numpy as np
import torch

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Memory, RunRecord
from swap_testkit.array import Array
from swap_testkit.torch.compare import bytes_of
from swap_testkit.torch.cpu_device import CpuAsDevice
from swap_testkit.torch.trainer import Trainer
from swap_torch import TorchSwapOptimizer, swap_optimizer
from swap_torch.device import AnyTorchDevice
from swap_torch.forms import is_wrapper, memories_of
from swap_torch.sharding import local_of

__all__ = ["Wrap", "array_of", "record_run", "wrapper"]

Wrap = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
"""Turns a native optimizer into the one to be compared with it."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wrapper(config: SwapOptimizerConfig, device: torch.device) -> Wrap:
    """The wrap that this kit is about, for training on ``device``.

    On the CPU, CPU tensors play the device's part; all optimizers of the run share it.
    """
    swap_device: AnyTorchDevice | None = CpuAsDevice() if device.type == "cpu" else None
    return partial(swap_optimizer, config=config, device=swap_device)


def record_run(
    trainer: Trainer, steps: int, *, wrap: Wrap | None = None, watch: bool = False
) -> RunRecord:
    """Train and record.

    Args:
        trainer: Fresh from its seed.
        steps: How many steps.
        wrap: Applied to each optimizer before the first step; None: the native run.
        watch: Also fingerprint every tensor after every step. Reading states waits for their
            stores, so a run that is watched has fewer steps in flight than one that is not.
    """
    for optimizer in trainer.optimizers:
        if wrap is not None and wrap(optimizer) is not optimizer:
            raise TypeError("record_run: wrap must change the optimizer in place and return it")
    record = RunRecord()
    seconds = [_time_steps(optimizer) for optimizer in trainer.optimizers]
    losses: list[torch.Tensor] = []
    for step in range(steps):
        loss = trainer.train_step(step)
        if loss is not None:
            losses.append(loss)
        if watch:
            record.digests.append(
                {name: array_of(value).digest() for name, value in _tensors(trainer)}
            )
    record.losses = [float(loss) for loss in losses]
    record.arrays = {name: array_of(value) for name, value in _tensors(trainer)}
    record.parameters = list(trainer.named_parameters())
    record.memory = _memory(trainer)
    record.step_seconds = [sum(parts) for parts in zip(*seconds, strict=True)]
    return record


def array_of(value: torch.Tensor | int | float) -> Array:
    """The local values of a tensor, or a counter; of a wrapper (a quantized state) its bytes."""
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    local = local_of(value)
    if is_wrapper(local):
        return Array("uint8", bytes_of(local).numpy())
    local = local.detach()
    name = str(local.dtype).removeprefix("torch.")
    if local.is_complex():
        local = torch.view_as_real(local)
    dense = local.cpu().contiguous()
    signed = dense.view(_SIGNED[dense.element_size()]).numpy()
    return Array(name, signed.view(_UNSIGNED[dense.element_size()]).copy())


def _tensors(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor | int | float]]:
    """Parameters, states and counters, by name."""
    names = {param: name for name, param in trainer.named_parameters().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key, option in group.items():
                # What updates change, such as a step that is the group's.
                if option is not optimizer.defaults.get(key) and _is_value(option):
                    yield f"{key} of group {index} of optimizer {number}", option
            for param in group["params"]:
                yield names[param], param
                for key, value in optimizer.state.get(param, {}).items():
                    if _is_value(value):
                        yield f"{key} of {names[param]}", value


def _is_value(value: object) -> TypeGuard[torch.Tensor | int | float]:
    return isinstance(value, (torch.Tensor, int, float))


def _time_steps(optimizer: torch.optim.Optimizer) -> list[float]:
    """Seconds of the host in each ``step()`` from now on, hooks included."""
    seconds: list[float] = []
    started = [0.0]

    def before(*_: object) -> None:
        started[0] = perf_counter()

    def after(*_: object) -> None:
        seconds.append(perf_counter() - started[0])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return seconds


def _memory(trainer: Trainer) -> Memory:
    """Bytes of states; those of a native optimizer are on the device all the time."""
    idle = peak = host = 0
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, TorchSwapOptimizer):
            report = optimizer.swap_report()
            idle += report.resident_bytes + report.idle_device_bytes
            peak += report.resident_bytes + report.peak_device_bytes
            host += report.host_bytes
        else:
            held = sum(map(_state_bytes, optimizer.state.values()))
            idle, peak = idle + held, peak + held
    return Memory(idle, peak, host)


def _state_bytes(states: dict[str, object]) -> int:
    """Bytes of a parameter's states but the counter, which is on the CPU."""
    tensors = [local_of(state) for state in states.values() if isinstance(state, torch.Tensor)]
    memories = [memory for t in tensors if t.dim() > 0 for memory in memories_of(t)]
    return sum(memory.untyped_storage().nbytes() for memory in memories)
