# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint as torchtitan uses it: flat optimizer states, asynchronous saves.

Under torchrun it is FSDP2 over all ranks; the loader is TorchData's, whose position is saved too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import _task
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from swap_torch import swap_optimizer


class Optimizer:
    """What the checkpointer sees: states by name, so that any number of ranks can load them."""

    options = sd.StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model, optimizer):
        self.of = model, optimizer

    def state_dict(self):
        return sd.get_optimizer_state_dict(*self.of, options=self.options)

    def load_state_dict(self, state_dict):
        sd.set_optimizer_state_dict(*self.of, state_dict, options=self.options)


def train(folder: Path, *, swap: bool = True, resume: bool = False, steps: int = 8):
    """Train with an asynchronous checkpoint in the middle, or from there on."""
    model = _task.model()
    if torch.distributed.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if swap:
        swap_optimizer(optimizer, _task.config(), device=_task.device())
    loader = StatefulDataLoader(_task.dataset(), batch_size=8)
    state = {"model": model, "optimizer": Optimizer(model, optimizer), "loader": loader}
    if resume:
        dcp.load(state, checkpoint_id=folder)
    for step, (x,) in enumerate(loader, start=steps // 2 if resume else 0):
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == steps // 2 and not resume:
            dcp.async_save(state, checkpoint_id=folder).result()  # at the latest before the next
    return model, optimizer


if __name__ == "__main__":
    print(train(Path(sys.argv[1]))[1])
