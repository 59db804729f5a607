# SPDX-License-Identifier: Apache-2.0
"""Experts spread over the ranks, tokens sent to them with uneven all-to-all."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx

from swap_testkit.torch.model import Block, FeedForward, ModelShape, Transformer, unit_initialised
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.scenarios.base import LmTrainer, Scenario
from swap_testkit.torch.trainer import OptimizerFactory, Trainer

__all__ = ["SCENARIOS", "RoutedExperts"]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that want them; the gradient goes the same way back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, received: list[int], sent: list[int]
    ) -> torch.Tensor:
        ctx.splits = (received, sent)  # type: ignore[attr-defined]  # torch: any attribute
        y = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(y, x.contiguous(), received, sent)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        received, sent = ctx.splits  # type: ignore[attr-defined]  # set in forward
        back = grads[0].new_empty((sum(sent), *grads[0].shape[1:]))
        dist.all_to_all_single(back, grads[0].contiguous(), sent, received)
        return back, None, None


class RoutedExperts(nn.Module):
    """A mixture of feed-forward experts, of which this rank has some; each token goes to one.

    An expert that gets no token has no gradient in that step.

    Args:
        shape: Sizes of an expert.
        experts: Experts on all ranks together.
        world: Ranks.
    """

    def __init__(self, shape: ModelShape, experts: int, world: int) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape) for _ in range(experts // world))
        self._world = world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BTD to BTD."""
        tokens = x.flatten(0, -2)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        here, there, chunks = self._exchange_counts(expert)
        arrived = _AllToAll.apply(tokens[order], there, here)  # type: ignore[no-untyped-call]
        done = self._compute(arrived, chunks)
        returned = _AllToAll.apply(done, here, there)  # type: ignore[no-untyped-call]
        mixed = torch.empty_like(returned).index_put((order,), returned)
        routed: torch.Tensor = (mixed * weight[:, None]).view(x.shape)
        return routed

    def _exchange_counts(self, expert: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
        """Rows to send to each rank, to get from each, and those by rank and expert of ours."""
        local = len(self.experts)
        wanted = torch.bincount(expert, minlength=local * self._world)
        coming = torch.empty_like(wanted)
        dist.all_to_all_single(coming, wanted)
        here = wanted.view(self._world, local).sum(1).tolist()
        there = coming.view(self._world, local).sum(1).tolist()
        return here, there, coming.tolist()

    def _compute(self, arrived: torch.Tensor, chunks: list[int]) -> torch.Tensor:
        parts = list(torch.split(arrived, chunks))
        for number, part in enumerate(parts):
            if len(part):
                parts[number] = self.experts[number % len(self.experts)](part)
        return torch.cat(parts)


class _ExpertTrainer(LmTrainer):
    """Shared parameters are averaged over the ranks, experts are each rank's own."""

    def _backward(self, step: int, part: int) -> torch.Tensor:
        loss = super()._backward(step, part)
        for name, param in self.model.named_parameters():
            if ".experts." not in name and param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size())
        return loss


def _build(clip_norm: float | None, place: Place, optimizer: OptimizerFactory) -> Trainer:
    shape = ModelShape()
    model = Transformer(shape)
    # Twice as many experts as four ranks need, so that some get no token in some steps.
    model.blocks[1] = Block(shape, RoutedExperts(shape, experts=8, world=place.world))
    unit_initialised(model, seed=1)
    return _ExpertTrainer(
        model.to(place.device), optimizer, place, stream=place.rank, clip_norm=clip_norm
    )


SCENARIOS = (
    Scenario(
        "ep", "expert parallel, uneven all-to-all, idle experts", (2, 4), partial(_build, None)
    ),
)
