# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of the blocks, and another optimizer for the rest, both swapped.

Muon's update needs whole matrices, so it communicates where they are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from swap_testkit.torch.model import ModelShape, Transformer, unit_initialised
from swap_testkit.torch.parallel import Parallel, Place, parallelize
from swap_testkit.torch.scenarios.base import LmTrainer, Scenario
from swap_testkit.torch.scenarios.tensor_parallel import for_loop, shard_tensors
from swap_testkit.torch.trainer import OptimizerFactory, Trainer

__all__ = ["SCENARIOS"]


class _TwoOptimizers(LmTrainer):
    """A trainer whose second optimizer is a Muon."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        place: Place,
        *,
        stream: int,
        clip_norm: float | None = 1.0,
    ) -> None:
        named = list(model.named_parameters())
        matrices = [param for name, param in named if _is_matrix(name, param)]
        rest = [{"params": [param for name, param in named if not _is_matrix(name, param)]}]
        super().__init__(model, optimizer, place, stream=stream, clip_norm=clip_norm, groups=rest)
        self._muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Both."""
        return [*super().optimizers, self._muon]

    def train_step(self, step: int) -> torch.Tensor:
        """One step of both."""
        self._muon.zero_grad()
        loss = super().train_step(step)
        self._muon.step()  # type: ignore[no-untyped-call]  # torch
        return loss


def _is_matrix(name: str, param: torch.Tensor) -> bool:
    return "blocks." in name and param.dim() == 2


def _data(
    parallel: Parallel, shape: ModelShape, place: Place, optimizer: OptimizerFactory
) -> Trainer:
    model = unit_initialised(Transformer(shape), seed=1).to(place.device)
    model = parallelize(model, parallel, place)
    return _TwoOptimizers(model, optimizer, place, stream=place.rank)


def _tensor(place: Place, optimizer: OptimizerFactory) -> Trainer:
    model = _whole(place)
    shard_tensors(model, place.mesh(place.world), sequence=False)
    # Global norms of DTensors and plain tensors together are beyond clip_grad_norm_.
    return _TwoOptimizers(model, for_loop(optimizer), place, stream=0, clip_norm=None)


def _both(place: Place, optimizer: OptimizerFactory) -> Trainer:
    model = _whole(place)
    mesh = place.mesh(place.world // 2, 2, names=("data", "tensor"))
    shard_tensors(model, mesh["tensor"], sequence=True)
    modules: Iterable[nn.Module] = (*model.blocks, model)
    for module in modules:
        fully_shard(module, mesh=mesh["data"])
    return _TwoOptimizers(model, optimizer, place, stream=place.rank // 2)


def _whole(place: Place) -> Transformer:
    model = Transformer()
    unit_initialised(model, seed=1)
    return model.to(place.device)


# Matrices of 6 and 10 rows: over 4 ranks 2, 2, 2, 0 and 3, 3, 3, 1.
_UNEVEN = ModelShape(width=6, heads=2, hidden=10)
_REST = ("adamw",)

SCENARIOS = (
    Scenario(
        "muon",
        "Muon for matrices, another optimizer for the rest",
        (1,),
        partial(_data, Parallel.NONE, ModelShape()),
        _REST,
    ),
    Scenario(
        "muon-fsdp", "the same, FSDP2", (2, 4), partial(_data, Parallel.FSDP, ModelShape()), _REST
    ),
    Scenario(
        "muon-fsdp-uneven",
        "the same, FSDP2, uneven and empty shards",
        (2, 4),
        partial(_data, Parallel.FSDP, _UNEVEN),
        _REST,
    ),
    Scenario("muon-tp", "the same, tensor parallel, columns and rows", (2, 4), _tensor, _REST),
    Scenario("muon-fsdp-tp", "the same, FSDP2 and tensor parallel, 2x2", (4,), _both, _REST),
)
