# SPDX-License-Identifier: Apache-2.0
"""What is trained twice: a user's job, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from swap_mindspore.versions import executor

__all__ = ["Job", "JobTrainer", "OptimizerFactory", "Trainer"]

OptimizerFactory: TypeAlias = Callable[[list[Parameter]], nn.Optimizer]
"""Makes an unwrapped optimizer from parameters."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training, as a user describes it. Everything must follow from the builder's seed.

    Attributes:
        net: What is trained.
        optimizer: Makes the optimizer to be compared, unwrapped, from the net's parameters.
        batch: Gives the batch of a step, the same in every run.
        loss: Computes the scalar loss of a batch.
        clip_norm: Clip the global gradient norm to this; None: do not.
        reduce: Applied to the gradients before clipping, such as a mean over processes.
        before: Called before each step with the optimizer and the step, such as to save and load.
    """

    net: nn.Cell
    optimizer: OptimizerFactory
    batch: Callable[[int], Any]
    loss: Callable[[nn.Cell, Any], Tensor]
    clip_norm: float | None = None
    reduce: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None = None
    before: Callable[[nn.Optimizer, int], None] | None = None


class Trainer(Protocol):
    """What the kit trains, natively and swapped."""

    optimizer: nn.Optimizer
    """Wrapped in place before the first step, or not."""
    update_seconds: list[float]
    """Of the host, for each step."""

    def train_step(self, step: int) -> Tensor:
        """Run one step and return its loss, before the update."""
        ...


class JobTrainer:
    """The plain training loop: forward and backward, clip, update.

    Args:
        job: What to train.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.optimizer = job.optimizer(job.net.trainable_params())
        self.update_seconds: list[float] = []
        """Of the host, for each step."""
        self._gradient = ms.value_and_grad(
            lambda batch: job.loss(job.net, batch), None, self.optimizer.parameters
        )

    def train_step(self, step: int) -> Tensor:
        """Run one step.

        Returns:
            The loss, before the update.
        """
        loss, gradients = self.gradients(step)
        self.update(gradients)
        return loss

    def gradients(self, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and what the optimizer gets, reduced and clipped as the job says."""
        job = self._job
        if job.before is not None:
            job.before(self.optimizer, step)
        loss, gradients = self._gradient(job.batch(step))
        if job.reduce is not None:
            gradients = job.reduce(gradients)
        if job.clip_norm is not None:
            gradients = ops.clip_by_global_norm(gradients, job.clip_norm)
        return loss, gradients

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """Call the optimizer, and take the time until the update is done and not only queued."""
        _finish()
        started = perf_counter()
        self.optimizer(gradients)
        _finish()
        self.update_seconds.append(perf_counter() - started)


def _finish() -> None:
    """Wait for everything that was queued."""
    if ms.get_context("device_target") == "CPU":
        executor.sync()
    else:
        ms.runtime.synchronize()
