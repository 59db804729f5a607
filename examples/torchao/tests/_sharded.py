# SPDX-License-Identifier: Apache-2.0
"""What processes of test_torchao.py run: FSDP2 over a small model, native beside swapped."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swap_testkit.torch import CpuAsDevice, assert_same_bits, same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

UNEVEN = (64, 129, 128)
"""Features: of the first weight only the second process' shard is quantized."""
EVEN = (64, 128, 128)


class Pair:
    """Two models with their optimizers, the second of which swaps."""

    def __init__(self, features: tuple[int, ...], seed: int = 0) -> None:
        warnings.simplefilter("ignore")  # torchao's, about enums in torch's trees
        torch.compile = lambda function, **_: function  # in this process, which ends soon
        from torchao.optim import AdamW8bit

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.models = []
        for _ in range(2):
            torch.manual_seed(seed)
            layers = pairwise(features)
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in layers))
            fully_shard(model, mesh=mesh)
            self.models.append(model)
        self.optimizers = [AdamW8bit(model.parameters(), lr=0.01) for model in self.models]
        self.device = CpuAsDevice(poison=True)
        config = SwapOptimizerConfig(min_numel=2, swap_times=3)
        swap_optimizer(self.optimizers[1], config, device=self.device)

    def train(self, steps: int, features: int = 64) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            batch = torch.randn(4, features)
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same_bits(*self.optimizers)
            assert self.device.held_bytes == 0

    def kinds(self) -> list[str]:
        """What the swapped one has of each parameter, in this process."""
        states = self.optimizers[1].state
        params = self.models[1].parameters()
        return [type(states[param]["exp_avg"].to_local()).__name__ for param in params]


def train_sharded() -> None:
    pair = Pair(UNEVEN)
    needed = pair.optimizers[1].host_memory().needed_bytes
    pair.train(3)
    assert pair.optimizers[1].swap_report().host_bytes == needed > 0
    assert {state.stays for state in pair.optimizers[1].swap_report().states} == {None}
    first = "Tensor" if torch.distributed.get_rank() == 0 else "OptimState8bit"
    assert pair.kinds()[0] == first


def save_and_load_sharded(folder: str) -> None:
    saved = Pair(EVEN)
    saved.train(2)
    assert saved.kinds()[0] == "OptimState8bit"
    for number, (model, optimizer) in enumerate(zip(saved.models, saved.optimizers, strict=True)):
        states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=Path(folder) / str(number))
    loaded = Pair(EVEN)
    for number, other in ((0, 1), (1, 0)):
        model, optimizer = loaded.models[number], loaded.optimizers[number]
        states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(states, checkpoint_id=Path(folder) / str(other))
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    for one, other in zip(saved.models[0].parameters(), loaded.models[0].parameters(), strict=True):
        state, twin = (pair.optimizers[0].state[p] for pair, p in ((saved, one), (loaded, other)))
        assert all(same_bits(state[key], twin[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    loaded.train(2)
