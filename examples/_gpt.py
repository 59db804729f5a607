# SPDX-License-Identifier: Apache-2.0
"""A small byte-level GPT, and text for it that every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT = 64  # bytes that the model sees
BATCH = 16  # sequences in a step
HEAD = 32  # width of an attention head

# Of the standard library. Which bytes they hold depends on the version of Python.
TEXT_FILES = (
    *("argparse.py", "configparser.py", "dataclasses.py", "difflib.py", "doctest.py", "enum.py"),
    *("functools.py", "inspect.py", "logging/__init__.py", "mailbox.py", "pickle.py", "shutil.py"),
    *("statistics.py", "subprocess.py", "tarfile.py", "threading.py", "tokenize.py", "typing.py"),
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, HEAD))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, context, HEAD
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).flatten(2))
        mlp: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + mlp


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
                nn.init.normal_(module.weight, std=0.05)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each next byte. ``text``: int64, batch x (CONTEXT + 1)."""
        positions = torch.arange(CONTEXT, device=text.device)
        x = self.byte(text[:, :-1]) + self.position(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def read_text() -> torch.Tensor:
    """Give the text's bytes: uint8, 1-D.

    Raises:
        FileNotFoundError: this Python's standard library is not there as .py files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in TEXT_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The training text is source code of the standard library, but {folder} lacks "
            f"{', '.join(missing)}. Use a Python whose library is installed as .py files."
        )
    content = b"".join((folder / name).read_bytes() for name in TEXT_FILES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batches(text: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Give the input of each step, always the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)].long()
