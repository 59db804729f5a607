# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules. Each stage of a process has an optimizer of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from swap_testkit.torch.model import ModelShape, Transformer, lm_loss, text_batch, unit_initialised
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.scenarios.base import Scenario
from swap_testkit.torch.trainer import OptimizerFactory, Trainer

__all__ = ["SCENARIOS"]

_MICROBATCHES = 4


class _Stage(nn.Module):
    """A part of a transformer: one block, with the embedding or the head at the ends."""

    def __init__(self, model: Transformer, number: int) -> None:
        super().__init__()
        last = len(model.blocks) - 1
        self.embedding = model.embedding if number == 0 else nn.Identity()
        self.block = model.blocks[number]
        self.norm = model.norm if number == last else nn.Identity()
        self.head = model.head if number == last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.block(self.embedding(x))))
        return y


class _PipelineTrainer:
    def __init__(self, place: Place, optimizer: OptimizerFactory, kind: str) -> None:
        chunks = 2 if kind == "interleaved" else 1
        count = place.world * chunks
        model = Transformer(ModelShape(layers=count))
        unit_initialised(model, seed=1)
        numbers = [place.rank + chunk * place.world for chunk in range(chunks)]
        self._place = place
        self._modules = {number: _Stage(model, number).to(place.device) for number in numbers}
        self._optimizers = [optimizer(module.parameters()) for module in self._modules.values()]
        stages = [
            PipelineStage(module, number, count, place.device)
            for number, module in self._modules.items()
        ]
        self._schedule = _schedule(kind, stages)
        self._first = 0 in numbers
        self._last = count - 1 in numbers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return {
            f"stage {number}: {name}": param
            for number, module in self._modules.items()
            for name, param in module.named_parameters()
        }

    def train_step(self, step: int) -> torch.Tensor | None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        tokens, targets = text_batch(step)
        losses: list[torch.Tensor] = []
        inputs = (tokens.to(self._place.device),) if self._first else ()
        if self._last:
            self._schedule.step(*inputs, target=targets.to(self._place.device), losses=losses)
        else:
            self._schedule.step(*inputs)
        for optimizer in self._optimizers:
            optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None


def _schedule(
    kind: str, stages: list[PipelineStage]
) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B:
    if kind == "interleaved":
        return ScheduleInterleaved1F1B([*stages], n_microbatches=_MICROBATCHES, loss_fn=lm_loss)
    schedule = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
    return schedule(stages[0], n_microbatches=_MICROBATCHES, loss_fn=lm_loss)


def _build(kind: str, place: Place, optimizer: OptimizerFactory) -> Trainer:
    return _PipelineTrainer(place, optimizer, kind)


SCENARIOS = (
    Scenario("pp-gpipe", "pipeline, GPipe", (2, 4), partial(_build, "gpipe")),
    Scenario("pp-1f1b", "pipeline, 1F1B", (2, 4), partial(_build, "1f1b")),
    Scenario(
        "pp-interleaved",
        "pipeline, interleaved 1F1B, two stages and optimizers per rank",
        (2, 4),
        partial(_build, "interleaved"),
    ),
)
