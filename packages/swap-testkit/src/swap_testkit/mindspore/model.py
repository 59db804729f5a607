# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model, and real text to train it on.

Shapes in comments: B batch, T sequence, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

__all__ = ["LanguageModel", "ModelShape", "lm_loss", "text_batch", "unit_initialised"]

VOCABULARY = 256
"""Bytes."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a :class:`LanguageModel`. The default trains in milliseconds."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    hidden: int = 64
    """Width of the feed-forward layers."""


class Block(nn.Cell):
    """Causal self-attention and a feed-forward layer, each after a norm, each added."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm((shape.width,))
        self.qkv = nn.Dense(shape.width, 3 * shape.width, has_bias=False)
        self.out = nn.Dense(shape.width, shape.width, has_bias=False)
        self.norm2 = nn.LayerNorm((shape.width,))
        self.up = nn.Dense(shape.width, shape.hidden)
        self.down = nn.Dense(shape.hidden, shape.width)

    def construct(self, x: Tensor) -> Tensor:
        """BTD to BTD."""
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        """BT(3D) to BTD."""
        batch, length, width = qkv.shape
        split = qkv.reshape(batch, length, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        query, key, value = split[0], split[1], split[2]  # BHT(D/H)
        scores = ops.matmul(query, key.transpose(0, 1, 3, 2)) * (query.shape[-1] ** -0.5)
        hidden = Tensor(np.triu(np.full((length, length), -1e9, np.float32), 1))
        mixed = ops.matmul(ops.softmax(scores + hidden, -1), value)
        return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width // 3)


class LanguageModel(nn.Cell):
    """A byte-level language model.

    Args:
        shape: Sizes.
        recompute: Whether blocks are computed again in the backward pass.
    """

    def __init__(self, shape: ModelShape | None = None, *, recompute: bool = False) -> None:
        super().__init__()
        shape = shape or ModelShape()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.CellList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm((shape.width,))
        self.head = nn.Dense(shape.width, VOCABULARY, has_bias=False)
        if recompute:
            for block in self.blocks:
                block.recompute()

    def construct(self, tokens: Tensor) -> Tensor:
        """Tokens BT to logits BTV."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def unit_initialised(net: nn.Cell, seed: int) -> nn.Cell:
    """Draw all parameters anew from ``seed``, whatever was drawn before."""
    for number, param in enumerate(net.get_parameters()):
        values = np.random.default_rng(seed * 100_003 + number)
        drawn = values.standard_normal(param.shape, dtype=np.float32)
        param.set_data(Tensor(drawn * np.float32(param.shape[-1] ** -0.5)))
    return net


def lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits BTV for targets BT."""
    flat = logits.astype(ms.float32).reshape(-1, VOCABULARY)
    return ops.cross_entropy(flat, targets.reshape(-1))


def text_batch(
    step: int, *, stream: int = 0, batch: int = 4, length: int = 16
) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, both of shape (batch, length), int32.

    Args:
        step: Which batch.
        stream: Another part of the text for each data-parallel rank.
        batch: Sequences.
        length: Tokens of each.
    """
    text = _text()
    starts = np.random.default_rng((step, stream)).integers(len(text) - length - 1, size=batch)
    rows = np.stack([text[start : start + length + 1] for start in starts])
    return Tensor(rows[:, :-1].copy()), Tensor(rows[:, 1:].copy())


@cache
def _text() -> NDArray[np.int32]:
    """Source text that every Python has, as bytes in int32."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    text = b"".join((stdlib / name).read_bytes() for name in ("argparse.py", "dataclasses.py"))
    return np.frombuffer(text, dtype=np.uint8).astype(np.int32)
