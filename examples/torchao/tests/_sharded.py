# SPDX-License-Identifier: Apache-2.0
"""What processes of test_torchao.py run: FSDP2 over a small model, native beside swapped."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swap_testkit.torch import CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer


def train_sharded() -> None:
    """Three steps; of the first weight only the second process' shard is quantized."""
    warnings.simplefilter("ignore")
    torch.compile = lambda function, **_: function  # in this process, which ends soon
    from torchao.optim import AdamW8bit  # after warnings are quiet

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(64, 129), torch.nn.Linear(129, 128))
        fully_shard(model, mesh=mesh)
        models.append(model)
    native, ours = (AdamW8bit(model.parameters(), lr=0.01) for model in models)
    device = CpuAsDevice(poison=True)
    swap_optimizer(ours, SwapOptimizerConfig(min_numel=2, swap_times=3), device=device)
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(4, 64)
        for model, optimizer in zip(models, (native, ours), strict=True):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(native, ours)
        assert device.held_bytes == 0
    assert {state.stays for state in ours.swap_report().states} == {None}
    kinds = [type(ours.state[p]["exp_avg"].to_local()).__name__ for p in models[1].parameters()]
    rank = torch.distributed.get_rank()
    assert kinds[0] == ("Tensor" if rank == 0 else "OptimState8bit"), kinds
