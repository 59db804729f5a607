# SPDX-License-Identifier: Apache-2.0
"""Transformers' Trainer: give it a swapped optimizer, and resume from its checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import _task
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from swap_torch import swap_optimizer


def train(folder: Path, *, swap: bool = True, resume: bool = False, steps: int = 6):
    """Train a tiny GPT-2 with a checkpoint in the middle, or from there on."""
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if swap:
        swap_optimizer(optimizer, _task.config(), device=_task.device())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    tokens = torch.randint(50, (32, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=steps // 2,
        per_device_train_batch_size=4,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, scheduler),
    )
    checkpoint = str(folder / f"checkpoint-{steps // 2}") if resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model, optimizer


if __name__ == "__main__":
    print(train(Path(sys.argv[1]))[1])
