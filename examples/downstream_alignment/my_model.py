# SPDX-License-Identifier: Apache-2.0
"""A model of yours, and how it is trained."""

from __future__ import annotations

import torch
from torch import nn

from swap_testkit.torch import Job


class MyModel(nn.Module):
    """Whatever you train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(4)])
        self.out = nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 48 to rows of 1."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: torch.Tensor = self.out(x)
        return y


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step: the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 48, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss(model: nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(rows[0]), rows[1])


def build(seed: int) -> Job:
    """One training: all that the testkit needs to know."""
    torch.manual_seed(seed)
    return Job(
        model=MyModel(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
        batch=batch,
        loss=loss,
        clip_norm=1.0,
    )
