# SPDX-License-Identifier: Apache-2.0
"""One process, DDP and FSDP2, with what is usually combined with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from swap_testkit.torch.model import ModelShape, Transformer, unit_initialised
from swap_testkit.torch.parallel import Parallel, Place, parallelize
from swap_testkit.torch.scenarios.base import LmTrainer, Scenario
from swap_testkit.torch.scenarios.optimizers import OPTIMIZERS
from swap_testkit.torch.trainer import OptimizerFactory, Trainer
from swap_torch.sharding import local_of

__all__ = ["SCENARIOS"]

RunBlock = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the scenarios of this file differ in."""

    parallel: Parallel = Parallel.FSDP
    param_dtype: torch.dtype | None = None
    reshard: bool = True
    run_block: RunBlock | None = None
    accumulate: int = 1
    scaler: bool = False
    """Scale the loss, and make one rank's gradient infinite in step 1."""
    shape: ModelShape = field(default_factory=ModelShape)
    groups: bool = False
    """Three parameter groups that differ in everything."""
    clip_norm: float | None = 1.0
    eager: bool = False
    """Train one step natively before anything is wrapped, so that states exist."""

    def build(self, place: Place, optimizer: OptimizerFactory) -> Trainer:
        """Make the trainer of this process."""
        model = unit_initialised(Transformer(self.shape, self.run_block), seed=1).to(place.device)
        model = parallelize(
            model, self.parallel, place, param_dtype=self.param_dtype, reshard=self.reshard
        )
        scaler = torch.amp.GradScaler(place.device.type, init_scale=1024.0, enabled=self.scaler)
        trainer = LmTrainer(
            model,
            optimizer,
            place,
            stream=place.rank,
            clip_norm=self.clip_norm,
            accumulate=self.accumulate,
            scaler=scaler,
            spoil=partial(_spoil, model, place) if self.scaler else None,
            groups=_three_groups(model) if self.groups else None,
        )
        if self.eager:
            trainer.train_step(-1)
        return trainer


def _three_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    norms = [p for name, p in named if "norm" in name]
    matrices = [p for name, p in named if "blocks" in name and "norm" not in name]
    rest = [p for name, p in named if "blocks" not in name and "norm" not in name]
    return [
        {"params": matrices, "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
        {"params": norms, "lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.0},
        {"params": rest, "lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01},
    ]


def _spoil(model: nn.Module, place: Place, step: int) -> None:
    """Make one gradient infinite, on one rank only: all ranks must agree to skip the step."""
    if step == 1 and place.rank == place.world - 1:
        grads = (local_of(p.grad) for p in model.parameters() if p.grad is not None)
        next(grad for grad in grads if grad.numel()).view(-1)[0] = float("inf")


def _recomputed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(block, x, use_reentrant=False)
    return y


def _offloaded(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        y: torch.Tensor = block(x)
    return y


# Norms of 6 elements and matrices of 6 rows: over 4 ranks 2, 2, 2 and an empty shard.
_UNEVEN = ModelShape(width=6, heads=2, hidden=10)
_PLAIN = Parallel.NONE
_BF16, _FP16 = torch.bfloat16, torch.float16

_KINDS: tuple[tuple[str, str, tuple[int, ...], _Kind], ...] = (
    ("single", "one process", (1,), _Kind(_PLAIN)),
    ("groups", "three parameter groups", (1,), _Kind(_PLAIN, groups=True)),
    ("eager-state", "states exist before wrapping", (1,), _Kind(_PLAIN, eager=True)),
    ("recompute", "activation recomputation", (1,), _Kind(_PLAIN, run_block=_recomputed)),
    ("offload", "activation offload", (1,), _Kind(_PLAIN, run_block=_offloaded)),
    ("ddp", "DistributedDataParallel", (2, 4), _Kind(Parallel.DDP)),
    ("fsdp", "FSDP2, fp32", (2, 4), _Kind()),
    ("fsdp-no-reshard", "FSDP2, not resharded after forward", (2, 4), _Kind(reshard=False)),
    ("fsdp-bf16", "FSDP2, bf16, reduced in fp32", (2, 4), _Kind(param_dtype=_BF16)),
    (
        "fsdp-fp16",
        "FSDP2, fp16, reduced in fp32, GradScaler, an inf on one rank",
        (2, 4),
        _Kind(param_dtype=_FP16, scaler=True),
    ),
    ("hsdp", "FSDP2 hybrid 2x2, bf16", (4,), _Kind(Parallel.HSDP, param_dtype=_BF16)),
    ("fsdp-uneven", "FSDP2, uneven and empty shards", (2, 4), _Kind(shape=_UNEVEN)),
    ("fsdp-accumulate", "FSDP2, gradient accumulation", (2, 4), _Kind(accumulate=3)),
    ("fsdp-scaler", "FSDP2, GradScaler, an inf on one rank", (2, 4), _Kind(scaler=True)),
    (
        "schedules",
        "loads and updates in the backward pass, kept batches, budgets",
        (1,),
        _Kind(_PLAIN, clip_norm=None),
    ),
    (
        "fsdp-schedules",
        "FSDP2, loads and updates in the backward pass, kept batches, budgets",
        (2, 4),
        _Kind(clip_norm=None),
    ),
    ("fsdp-recompute", "FSDP2 and recomputation", (2, 4), _Kind(run_block=_recomputed)),
    ("fsdp-offload", "FSDP2 and activation offload", (2, 4), _Kind(run_block=_offloaded)),
)


_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"prefetch": "backward"},
    {"overlap_backward": True},
    {"device_budget": 0.3, "prefetch": "backward"},
    {"zigzag": True},
    {"zigzag": True, "prefetch": "backward"},
    {"offload": "auto"},
)


def _scenario(name: str, about: str, worlds: tuple[int, ...], kind: _Kind) -> Scenario:
    # With a scaler the second step is skipped; the third goes on after it.
    least_steps = 3 if kind.scaler else 2
    scenario = Scenario(name, about, worlds, kind.build, least_steps=least_steps)
    if name.endswith("schedules"):
        # The first step has no plan yet, the second is watched.
        optimizers = ("adam", "adamw", "adamw-fused")
        return replace(scenario, schedules=_SCHEDULES, least_steps=4, optimizers=optimizers)
    more: tuple[str, ...] = ()
    if worlds == (1,):
        # One process is cheap, so it also runs what makes no difference to sharding.
        more = ("adam-amsgrad",)
    if name == "single":
        more = tuple(name for name in OPTIMIZERS if name not in scenario.optimizers)
    if name == "fsdp-uneven":
        more = ("sgd",)
    return replace(scenario, optimizers=(*scenario.optimizers, *more))


SCENARIOS = tuple(_scenario(*row) for row in _KINDS)
