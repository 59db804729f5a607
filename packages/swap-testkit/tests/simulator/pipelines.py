# SPDX-License-Identifier: Apache-2.0
"""A native optimizer and its swapped twin on the simulated accelerator."""

from __future__ import annotations

from typing import Any

import torch

from swap_testkit.torch import assert_same_bits, simulator
from swap_torch import SwapOptimizerConfig, swap_optimizer

DEVICE = "simnpu"

PARAMETERS = [
    ((7,), torch.float32),
    ((5, 3), torch.float32),
    ((40,), torch.bfloat16),
    ((2, 2, 2), torch.float64),
    ((129,), torch.float32),
    ((11,), torch.float32),
    ((300,), torch.float32),
]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam, for-loop": (torch.optim.Adam, {"foreach": False}),
    "adam, foreach": (torch.optim.Adam, {}),
    "adam, amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw, for-loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw, foreach": (torch.optim.AdamW, {"maximize": True}),
    "adamw, fused": (torch.optim.AdamW, {"fused": True}),
    "adamw, fused, amsgrad": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
}


class Twins:
    """Two optimizers with the same parameters and gradients; each parameter is a batch.

    Args:
        kind: Of :data:`OPTIMIZERS`.
        packed: Which pipeline.
        swap_times: Batches.
    """

    def __init__(
        self, kind: str = "adamw, for-loop", *, packed: bool = True, swap_times: int = 99
    ) -> None:
        self.native, self.swapped = _optimizer(kind), _optimizer(kind)
        config = SwapOptimizerConfig(swap_times=swap_times, min_numel=1, packed_swap=packed)
        swap_optimizer(self.swapped, config)
        self.steps = 0

    def give_gradients(self) -> None:
        """Equal ones, made on the device, on the stream that is current."""
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        for p, q in zip(parameters(self.native), parameters(self.swapped), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(DEVICE)
            q.grad = p.grad.clone()

    def step(self) -> None:
        """Update both; nobody waits, and nothing is read."""
        self.give_gradients()
        self.native.step()
        self.swapped.step()

    def check(self) -> None:
        """Fail if a bit differs. The first thing that the host does is to read the states."""
        for state in self.swapped.state.values():
            for value in state.values():
                if value.device.type == "cpu":
                    value.clone()
        assert_same_bits(self.native, self.swapped)

    def run(self, steps: int = 3, *, read_at_each: bool = False) -> None:
        """Update a few times and compare, in each step or at the end."""
        with simulator.strict_free():
            for _ in range(steps):
                self.step()
                if read_at_each:
                    self.check()
            self.check()


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of its only group."""
    members: list[torch.Tensor] = optimizer.param_groups[0]["params"]
    return members


def _optimizer(kind: str) -> torch.optim.Optimizer:
    make, options = OPTIMIZERS[kind]
    generator = torch.Generator().manual_seed(0)
    return make(
        [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(DEVICE))
            for shape, dtype in PARAMETERS
        ],
        lr=0.1,
        **options,
    )
