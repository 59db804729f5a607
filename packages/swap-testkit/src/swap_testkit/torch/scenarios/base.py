# SPDX-License-Identifier: Apache-2.0
"""What a scenario is, and the training loop that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from swap_core import SwapOptimizerConfig
from swap_testkit.torch.model import lm_loss, text_batch
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.trainer import OptimizerFactory, Trainer

__all__ = ["LmTrainer", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to train in parallel.

    Attributes:
        name: As on the command line.
        about: One line for reports.
        worlds: World sizes in which it runs.
        build: Makes the trainer of this process, the same each time it is called.
        optimizers: Names of :data:`swap_testkit.torch.scenarios.OPTIMIZERS` that it runs with.
        least_steps: Steps without which it does not show what it is for; more may be asked for.
        schedules: Fields in which it varies each config that is asked for.
    """

    name: str
    about: str
    worlds: tuple[int, ...]
    build: Callable[[Place, OptimizerFactory], Trainer]
    optimizers: tuple[str, ...] = ("adam", "adamw", "adamw-fused", "hyper-adamw")
    least_steps: int = 2
    schedules: tuple[Mapping[str, Any], ...] = ({},)

    def varied(self, configs: Sequence[SwapOptimizerConfig]) -> tuple[SwapOptimizerConfig, ...]:
        """Each config with each of the schedules; per tensor no batch can be kept."""
        return tuple(
            replace(config, **fields)
            for config in configs
            for fields in self.schedules
            if not (fields.get("zigzag") and config.packed_swap is False)
        )


class LmTrainer:
    """Train a language model on this process's part of the text.

    Args:
        model: Parallel already.
        optimizer: Makes the optimizer.
        place: Where this process is.
        stream: Which part of the text; ranks that hold parts of one model must have the same.
        clip_norm: Clip the global gradient norm to this; None: do not.
        accumulate: Backward passes per step.
        scaler: Scales the loss, and skips a step in which a gradient is not finite.
        spoil: Called before the optimizer's step with the number of the step.
        groups: Parameter groups; None: all parameters of the model in one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        place: Place,
        *,
        stream: int = 0,
        clip_norm: float | None = 1.0,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        spoil: Callable[[int], None] | None = None,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        self.model = model
        self._optimizer = optimizer(groups or model.parameters())
        self._place = place
        self._stream = stream
        self._clip_norm = clip_norm
        self._accumulate = accumulate
        self._scaler = scaler or torch.amp.GradScaler(place.device.type, enabled=False)
        self._spoil = spoil

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The only one."""
        return [self._optimizer]

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """The model's own names."""
        return dict(self.model.named_parameters())

    def train_step(self, step: int) -> torch.Tensor:
        """Forward and backward as often as told, clip, step."""
        self._optimizer.zero_grad()
        losses = [self._backward(step, part) for part in range(self._accumulate)]
        if self._spoil is not None:
            self._spoil(step)
        if self._clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return torch.stack(losses).mean()

    def _backward(self, step: int, part: int) -> torch.Tensor:
        tokens, targets = text_batch(step * self._accumulate + part, stream=self._stream)
        logits = self.model(tokens.to(self._place.device))
        loss = lm_loss(logits, targets.to(self._place.device)) / self._accumulate
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch
        return loss.detach()
