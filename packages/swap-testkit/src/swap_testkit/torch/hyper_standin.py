# SPDX-License-Identifier: Apache-2.0
"""A stand-in for HyperParallel's AdamW, which no package index carries.

It has that optimizer's interface and counting: one Python int per group, advanced in every step,
also without gradients; one step shared by all parameters of a fused call; states like the gradient.
Where HyperParallel is installed the real one is used instead. That gives the kernel an int64 step,
as Ascend's takes it; CUDA's reads float32 whatever it is given, and gives NaN. So the
step is float32 here, which every kernel takes; on the CPU both give the same bits.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["HYPER_MODULE", "install"]

HYPER_MODULE = "hyper_parallel.core.optimizer.adamw"


def adamw(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    step: int,
    *,
    amsgrad: bool,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """Update in place, with torch's fused kernel and one step for all."""
    steps = [torch.tensor(step, dtype=torch.float32, device=params[0].device)] * len(params)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs if amsgrad else [],
        steps,
        amsgrad=amsgrad,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )


class AdamW(torch.optim.Optimizer):
    """AdamW with a step per group."""

    def __init__(self, params: ParamsT, lr: float = 1e-3, **options: object) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        flags = {"amsgrad": False, "maximize": False}
        super().__init__(params, {**defaults, **flags, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch: overloads
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = (group.get("step") or 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for param, grad in zip(params, grads, strict=True):
            if not self.state[param]:
                self.state[param] = {key: torch.zeros_like(grad) for key in keys}
        states = {key: [self.state[param][key] for param in params] for key in keys}
        beta1, beta2 = group["betas"]
        adamw(
            params,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            states.get("max_exp_avg_sq", []),
            group["step"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def install() -> None:
    """Put the stand-in where HyperParallel's module would be, unless something is there."""
    if HYPER_MODULE not in sys.modules:
        module = ModuleType(HYPER_MODULE, __doc__)
        module.__dict__.update(AdamW=AdamW, adamw=adamw)
        AdamW.__module__ = adamw.__module__ = HYPER_MODULE
        sys.modules[HYPER_MODULE] = module
