# SPDX-License-Identifier: Apache-2.0
"""What is trained twice: a user's job, or a ready-made scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

__all__ = ["Job", "JobTrainer", "OptimizerFactory", "Trainer"]

OptimizerFactory: TypeAlias = Callable[[ParamsT], torch.optim.Optimizer]
"""Makes an unwrapped optimizer from parameters or parameter groups. A factory and not an optimizer,
since sharding a model replaces its parameters."""


class Trainer(Protocol):
    """A model in training on this process, fresh from its seed."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this process: those that get wrapped."""
        ...

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter of the optimizers, by a name for reports."""
        ...

    def train_step(self, step: int) -> torch.Tensor | None:
        """Train one step, the optimizers' step included.

        Returns:
            The detached loss; None on a process that does not see it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One training, as a user describes it. Everything must follow from the builder's seed.

    Attributes:
        model: On the device on which it is trained.
        optimizer: Makes the optimizer to be compared, unwrapped.
        batch: Gives the batch of a step, the same in every run.
        loss: Computes the scalar loss of a batch.
        clip_norm: Clip the global gradient norm to this; None: do not.
    """

    model: nn.Module
    optimizer: OptimizerFactory
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    clip_norm: float | None = None


class JobTrainer:
    """The plain training loop: forward, backward, clip, step.

    Args:
        job: What to train.
        model: The job's model, made parallel.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job = job
        self._model = model
        self._optimizer = job.optimizer(model.parameters())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The only one."""
        return [self._optimizer]

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """The model's own names."""
        return dict(self._model.named_parameters())

    def train_step(self, step: int) -> torch.Tensor:
        """Run one step."""
        self._optimizer.zero_grad()
        loss = self._job.loss(self._model, self._job.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        if self._job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._job.clip_norm)
        self._optimizer.step()
        return loss.detach()
