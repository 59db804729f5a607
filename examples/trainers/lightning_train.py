# SPDX-License-Identifier: Apache-2.0
"""Lightning: it always passes a closure to ``step()``, so allow it."""

from __future__ import annotations

import sys
from pathlib import Path

import _task
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from swap_torch import swap_optimizer


class Module(lightning.LightningModule):
    def __init__(self, swap: bool, manual: bool):
        super().__init__()
        self.model, self.swap = _task.model(), swap
        self.automatic_optimization = not manual

    def training_step(self, batch):
        loss = (self.model(batch[0]) - batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if self.swap:
            swap_optimizer(optimizer, _task.config(allow_closure=True), device=_task.device())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(folder: Path, *, swap: bool = True, resume: bool = False, manual: bool = False):
    """Train two epochs with a checkpoint after the first, or from there on."""
    module = Module(swap, manual)
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        gradient_clip_val=None if manual else 1.0,
    )  # fmt: skip
    checkpoint = str(folder / "epoch=0.ckpt") if resume else None
    trainer.fit(module, DataLoader(_task.dataset(), batch_size=8), ckpt_path=checkpoint)
    return module.model, trainer.optimizers[0]


if __name__ == "__main__":
    print(train(Path(sys.argv[1]))[1])
