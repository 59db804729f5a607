# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate: wrap the optimizer, then prepare it like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import _task
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from swap_torch import swap_optimizer


def train(folder: Path, *, swap: bool = True, resume: bool = False, fsdp: bool = False):
    """Train; save everything after the first epoch, or begin from there."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(fsdp_plugin=plugin if fsdp else None)
    model = _task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if swap:
        swap_optimizer(optimizer, _task.config(), device=_task.device())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    loader = DataLoader(_task.dataset(), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(str(folder))
    for epoch in range(1 if resume else 0, 2):
        for (x,) in loader:
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(folder))
    return accelerator.unwrap_model(model), optimizer.optimizer


if __name__ == "__main__":
    print(train(Path(sys.argv[1]))[1])
