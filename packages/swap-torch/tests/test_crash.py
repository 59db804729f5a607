# SPDX-License-Identifier: Apache-2.0
"""Killed at any moment, a training resumes from its last checkpoint and ends with the same bits.

This file, run as a program, forks a process for each life of a training, and ends it with SIGKILL
at a random moment of a random step: in the update, while the state dict is made or written, while
another one is loaded.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep

import torch
from torch import nn

from swap_testkit.torch import CopySchedule, CpuAsDevice
from swap_torch import SwapOptimizerConfig, swap_optimizer

STEPS = 60
EVERY = 3
"""Steps between checkpoints."""
TRAININGS = 5
"""Each with a seed and a config of its own."""
KILLS = 10
"""Of each."""


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 30))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=seed % 2 == 0)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    folder: Path,
    progress: Connection | None,
) -> str:
    """Train to the end with a checkpoint now and then; a digest of everything."""
    for step in range(first, STEPS):
        if progress is not None:
            progress.send(step)
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save(model, optimizer, step + 1, folder)
    values = list(model.state_dict().values())
    values += [value for state in optimizer.state.values() for value in state.values()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Write a file, and then give it its name: no checkpoint of that name is unfinished."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / "unfinished")
    (folder / "unfinished").replace(folder / "checkpoint")


def live(progress: Connection, seed: int, folder: Path) -> None:
    """Train from the last checkpoint on, as long as life lasts."""
    warnings.simplefilter("error")
    model, optimizer = build(seed)
    config = SwapOptimizerConfig(min_numel=40, swap_times=3, packed_swap=seed % 3 != 0)
    swap_optimizer(optimizer, config, device=CpuAsDevice(schedule=CopySchedule.LATEST))
    first = 0
    if (folder / "checkpoint").exists():
        progress.send(-1)  # a moment to be killed at, too
        saved = torch.load(folder / "checkpoint", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    progress.send(train(model, optimizer, first, folder, progress))


def start(seed: int, folder: Path) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(theirs, seed, folder))
    process.start()
    theirs.close()
    return process, ours


def kill_at_random(chance: random.Random, seed: int, folder: Path) -> int | str:
    """Begin a life and end it; the step it was in. Its digest, if it came to the end before."""
    process, progress = start(seed, folder)
    seen: int | str = progress.recv()
    for _ in range(chance.randrange(2 * EVERY)):
        if isinstance(seen, str):
            break
        seen = progress.recv()
    sleep(chance.uniform(0, 0.004))
    if process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return seen


def main(folder: Path) -> None:
    """Train natively once, and swapped with many deaths; print what came of it."""
    torch.set_num_threads(1)  # a child would wait for threads that only its parent has
    chance = random.Random(0)
    for seed in range(TRAININGS):
        place = folder / f"{seed}"
        place.mkdir()
        expected = train(*build(seed), first=0, folder=place, progress=None)
        (place / "checkpoint").unlink()
        killed = [kill_at_random(chance, seed, place) for _ in range(KILLS)]
        process, progress = start(seed, place)
        found: int | str = progress.recv()
        while isinstance(found, int):
            found = progress.recv()
        process.join()
        says = "same bits" if found == expected else f"{found} and not {expected}"
        print(f"training {seed} killed at {killed}: {says}", flush=True)


def test_a_training_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": same bits\n") == TRAININGS, done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
