# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level GPT twice from one seed, natively and swapped, and compare.

``python examples/train_gpt.py --help`` lists the options. Needs swap-torch, matplotlib and rich; on
a machine without an accelerator also swap-testkit. Exits with 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from swap_core import format_bytes
from swap_torch import (
    AcceleratorDevice,
    DeviceMemory,
    SwapOptimizerConfig,
    TorchSwapDevice,
    TorchSwapOptimizer,
    swap_optimizer,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Adam, AdamW, Optimizer

SEED = 0
CONTEXT = 64  # bytes that the model sees
BATCH = 12  # sequences in a step
HEAD = 32  # width of an attention head
LEARNING_RATE = 2e-3

OPTIMIZERS: dict[str, type[Adam]] = {"adam": Adam, "adamw": AdamW}
TEXT_FILES = (
    "argparse.py configparser.py dataclasses.py difflib.py doctest.py enum.py functools.py "
    "inspect.py logging/__init__.py mailbox.py pickle.py shutil.py statistics.py subprocess.py "
    "tarfile.py threading.py tokenize.py typing.py unittest/mock.py"
).split()


# The model and its text.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, HEAD))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, context, HEAD
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each next byte; ``text`` is batch x (CONTEXT + 1)."""
        positions = torch.arange(CONTEXT, device=text.device)
        x = self.byte(text[:, :-1]) + self.position(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def read_text() -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in TEXT_FILES if not (folder / name).is_file()]
    if missing:
        sys.exit(
            f"The training text is source code of the standard library, but {folder} lacks "
            f"{', '.join(missing)}. Use a Python whose library is installed as .py files."
        )
    data = b"".join((folder / name).read_bytes() for name in TEXT_FILES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)].long()


# What is measured.


class MemoryRecorder:
    """A device for ``swap_optimizer`` that notes what its inner device holds, and when."""

    def __init__(self, inner: TorchSwapDevice[Any, Any]) -> None:
        self._inner = inner
        self._host: list[range] = []
        self.held = 0
        self.peak = 0
        self.samples: list[tuple[float, int]] = []
        """Seconds, and the bytes held from then on."""
        self.stored: list[float] = []
        """When the store of a batch was queued: its update is queued then, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # every other verb, unchanged

    def restore(self, memory: DeviceMemory) -> None:
        before = storage_bytes(memory)
        self._inner.restore(memory)
        self._note(storage_bytes(memory) - before)

    def release(self, memory: DeviceMemory) -> None:
        before = storage_bytes(memory)
        self._inner.release(memory)
        self._note(storage_bytes(memory) - before)

    def copy_out(self, stream: Any, transfers: Any) -> None:
        self._inner.copy_out(stream, transfers)
        self.stored.append(perf_counter())

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        block = self._inner.allocate_host(nbytes)
        self._host.append(range(block.data_ptr(), block.data_ptr() + nbytes))
        return block

    def restart(self) -> None:
        self.samples = [(perf_counter(), self.held)]
        self.stored = []

    def holds(self, state: torch.Tensor) -> bool:
        """Whether a state lies on the device, which may be CPU memory in that role."""
        on_device: bool = state.device == self.torch_device
        return on_device and not any(state.data_ptr() in block for block in self._host)

    def _note(self, change: int) -> None:
        self.held += change
        self.peak = max(self.peak, self.held)
        self.samples.append((perf_counter(), self.held))


def storage_bytes(memory: DeviceMemory) -> int:
    return sum(storage.nbytes() for storage in memory.storages)


def resident_bytes(optimizer: Optimizer, recorder: MemoryRecorder) -> int:
    """Bytes of states that are on the device now. Step counters are not counted."""
    return sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and recorder.holds(value)
    )


@dataclass
class Run:
    """One training, measured; tensors are copies on the CPU."""

    name: str
    losses: list[torch.Tensor] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    idle_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    step_times: list[float] = field(default_factory=list)
    phases: tuple[float, ...] = ()
    """Of the last step: start, end of forward, of backward, of the update."""
    samples: list[tuple[float, int]] = field(default_factory=list)
    """Of the last step: seconds, and the optimizer's device bytes from then on."""
    stored: list[float] = field(default_factory=list)
    allocated: tuple[int, int] | None = None
    """Bytes that the accelerator's allocator counts: after the last step, and at the peak."""
    report: str = ""
