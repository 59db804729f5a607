# SPDX-License-Identifier: Apache-2.0
"""The sequence spread over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from swap_testkit.torch.model import (
    Attention,
    ModelShape,
    Transformer,
    lm_loss,
    text_batch,
    unit_initialised,
)
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.scenarios.base import LmTrainer, Scenario
from swap_testkit.torch.trainer import OptimizerFactory, Trainer

__all__ = ["SCENARIOS"]


class _GatherSequence(torch.autograd.Function):
    """All ranks' parts of the sequence (dimension 1); gradients are summed and cut again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class _RingFreeAttention(Attention):
    """Causal attention of this rank's queries over all ranks' keys and values, gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, rank = x.shape[1], dist.get_rank()
        key, value = (
            self.heads(_GatherSequence.apply(project(x)))  # type: ignore[no-untyped-call]
            for project in (self.key, self.value)
        )
        rows = torch.arange(length, device=x.device) + rank * length
        seen = torch.arange(key.shape[2], device=x.device)[None] <= rows[:, None]
        mixed = F.scaled_dot_product_attention(
            self.heads(self.query(x)), key, value, attn_mask=seen
        )
        return self.merge(mixed)


class _SequenceTrainer(LmTrainer):
    """Every rank has a part of each sequence; gradients and losses are averaged."""

    def _backward(self, step: int, part: int) -> torch.Tensor:
        rank, world = self._place.rank, self._place.world
        tokens, targets = (
            whole.chunk(world, 1)[rank].contiguous().to(self._place.device)
            for whole in text_batch(step)
        )
        loss = lm_loss(self.model(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        for param in self.model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad.div_(world)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / world


def _build(place: Place, optimizer: OptimizerFactory) -> Trainer:
    shape = ModelShape()
    model = Transformer(shape)
    for block in model.blocks:
        block.attention = _RingFreeAttention(shape)
    unit_initialised(model, seed=1)
    return _SequenceTrainer(model.to(place.device), optimizer, place)


SCENARIOS = (Scenario("cp", "context parallel, keys and values gathered, causal", (2, 4), _build),)
