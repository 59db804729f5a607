# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, with and without sequence parallelism, and together with FSDP2."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim.optimizer import ParamsT

from swap_testkit.torch.model import Transformer, unit_initialised
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.scenarios.base import LmTrainer, Scenario
from swap_testkit.torch.trainer import OptimizerFactory, Trainer

__all__ = ["SCENARIOS", "for_loop", "shard_tensors"]


def shard_tensors(model: Transformer, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Cut the matrices of a model over ``mesh``.

    With ``sequence`` norms and the stream between layers are cut along the sequence, and every
    parameter is a DTensor; without, only the matrices are, and the rest stays plain.
    """
    if sequence:
        whole: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, whole)
    for block in model.blocks:
        parallelize_module(block, mesh, _block_plan(sequence=sequence))


def _block_plan(*, sequence: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    if sequence:
        gather = partial(
            PrepareModuleInput,
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
        )
        plan |= {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": gather(),
            "feed_forward": gather(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


def _model(place: Place) -> Transformer:
    model = Transformer()
    unit_initialised(model, seed=1)
    return model.to(place.device)


def _tensor(sequence: bool, place: Place, optimizer: OptimizerFactory) -> Trainer:
    model = _model(place)
    shard_tensors(model, place.mesh(place.world), sequence=sequence)
    if sequence:
        return LmTrainer(model, optimizer, place)
    # Global norms of DTensors and plain tensors together are beyond clip_grad_norm_.
    return LmTrainer(model, for_loop(optimizer), place, clip_norm=None)


def for_loop(optimizer: OptimizerFactory) -> OptimizerFactory:
    """Without foreach, the default on accelerators: it refuses DTensors beside plain tensors."""

    def make(params: ParamsT) -> torch.optim.Optimizer:
        made = optimizer(params)
        for group in made.param_groups:
            group["foreach"] = False
        return made

    return make


def _fsdp_tensor(place: Place, optimizer: OptimizerFactory) -> Trainer:
    model = _model(place)
    mesh = place.mesh(place.world // 2, 2, names=("data", "tensor"))
    shard_tensors(model, mesh["tensor"], sequence=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return LmTrainer(model, optimizer, place, stream=place.rank // 2)


def _two_meshes(place: Place, optimizer: OptimizerFactory) -> Trainer:
    """One block over a mesh of all ranks, the other over halves of it, the rest plain."""
    model = _model(place)
    whole = place.mesh(place.world)
    halves = place.mesh(2, place.world // 2, names=("half", "tensor"))
    for block, mesh in zip(model.blocks, (whole, halves["tensor"]), strict=True):
        _shard_block(block, mesh)
    return LmTrainer(model, for_loop(optimizer), place, clip_norm=None)


def _shard_block(block: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(block, mesh, _block_plan(sequence=False))


_MIXED = ("adam", "adamw")
"""Native fused kernels refuse a list that has DTensors and plain tensors."""

_REDISTRIBUTED = ("adam", "adamw", "adamw-fused")
"""Here gradients have other placements than their parameters.

HyperParallel's AdamW has no equal: it makes states like the gradient, and torch then writes their
update to a redistributed copy, so the native moments stay zero (docs/coverage.md).
"""

SCENARIOS = (
    Scenario(
        "tp",
        "tensor parallel; DTensors and plain tensors",
        (2, 4),
        partial(_tensor, False),
        _MIXED,
    ),
    Scenario(
        "tp-sp",
        "tensor and sequence parallel",
        (2, 4),
        partial(_tensor, True),
        (*_REDISTRIBUTED, "sgd"),
    ),
    Scenario("fsdp-tp", "FSDP2 and tensor and sequence parallel, 2x2", (4,), _fsdp_tensor),
    Scenario(
        "two-meshes",
        "DTensors of two meshes and plain tensors in one optimizer",
        (4,),
        _two_meshes,
        _MIXED,
    ),
)
