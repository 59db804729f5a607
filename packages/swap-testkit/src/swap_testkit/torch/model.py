# SPDX-License-Identifier: Apache-2.0
"""A small transformer that can be cut in every usual way, and real text to train it on.

Shapes in comments: B batch, T sequence, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "Attention",
    "Block",
    "FeedForward",
    "ModelShape",
    "Transformer",
    "lm_loss",
    "text_batch",
    "unit_initialised",
]

VOCABULARY = 256
"""Bytes."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a :class:`Transformer`. The default trains in milliseconds."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    hidden: int = 64
    """Width of the feed-forward layers."""


class Attention(nn.Module):
    """Causal self-attention.

    The number of heads follows from the width of the projections, so it is right under tensor
    parallelism too.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BTD to BTD."""
        query, key, value = self.heads(self.query(x)), self.heads(self.key(x)), self.value(x)
        mixed = F.scaled_dot_product_attention(query, key, self.heads(value), is_causal=True)
        return self.merge(mixed)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """BTD to BHT(D/H)."""
        return torch.unflatten(x, -1, (-1, self.head_width)).transpose(1, 2)

    def merge(self, mixed: torch.Tensor) -> torch.Tensor:
        """BHT(D/H) to BTD, projected."""
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BTD to BTD."""
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and feed-forward, each after a norm, each added to the stream.

    Args:
        shape: Sizes.
        feed_forward: Another module in place of the :class:`FeedForward`, such as routed experts.
    """

    def __init__(self, shape: ModelShape, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape) if feed_forward is None else feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BTD to BTD."""
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.feed_forward(self.norm2(x))
        return y


class Transformer(nn.Module):
    """A byte-level language model.

    Args:
        shape: Sizes.
        run_block: How a block is run: plainly, recomputed, with offloaded activations.
    """

    def __init__(
        self,
        shape: ModelShape | None = None,
        run_block: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        shape = shape or ModelShape()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.run_block = run_block or _plainly

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens BT to logits BTV."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _plainly(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block(x)
    return y


def unit_initialised(model: nn.Module, seed: int) -> nn.Module:
    """Draw all parameters anew from ``seed``, name by name, whatever was drawn before."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(seed * 100_003 + number)
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float32)
            param.copy_(drawn * param.shape[-1] ** -0.5)
    return model


def lm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits BTV for targets BT."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def text_batch(
    step: int, *, stream: int = 0, batch: int = 4, length: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, both of shape (batch, length), int64.

    Args:
        step: Which batch.
        stream: Another part of the text for each data-parallel rank.
        batch: Sequences.
        length: Tokens of each.
    """
    text = _text()
    generator = torch.Generator().manual_seed((step + 1) * 1009 + stream)
    starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
    rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@cache
def _text() -> torch.Tensor:
    """Source text that every Python has, as bytes in int64."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    text = b"".join((stdlib / name).read_bytes() for name in ("argparse.py", "dataclasses.py"))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
