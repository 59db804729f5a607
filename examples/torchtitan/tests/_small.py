# SPDX-License-Identifier: Apache-2.0
"""Models and containers small enough to be made by the dozen."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from swap_testkit.torch import CpuAsDevice
from swap_torch.integrations.torchtitan import SwapOptimizersContainer


class OnTheCpu(SwapOptimizersContainer):
    """For machines without an accelerator."""

    @dataclass(kw_only=True, slots=True)
    class Config(SwapOptimizersContainer.Config):
        pass

    def swap_device(self):
        return CpuAsDevice()


def parts():
    torch.manual_seed(0)
    return [nn.Sequential(OrderedDict({name: nn.Linear(40, 40)})) for name in ("one", "two")]


def train(optimizers, model_parts, steps):
    for step in range(steps):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        for part in model_parts:
            x = part(x)
        x.square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()


def bits(state_dict):
    """Tensors by what their memory holds."""
    return {
        name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }
