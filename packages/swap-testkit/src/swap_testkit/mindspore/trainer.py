# SPDX-License-Identifier: Apache-2.0
"""What is trained twice: a user's job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

__all__ = ["Job", "JobTrainer", "OptimizerFactory"]

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
    """

    net: nn.Cell
    optimizer: OptimizerFactory
    batch: Callable[[int], Any]
    loss: Callable[[nn.Cell, Any], Tensor]
    clip_norm: float | None = None
    reduce: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None = None


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
        loss, gradients = self._gradient(self._job.batch(step))
        if self._job.reduce is not None:
            gradients = self._job.reduce(gradients)
        if self._job.clip_norm is not None:
            gradients = ops.clip_by_global_norm(gradients, self._job.clip_norm)
        started = perf_counter()
        self.optimizer(gradients)
        self.update_seconds.append(perf_counter() - started)
        return loss
