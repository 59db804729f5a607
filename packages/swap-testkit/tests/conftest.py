# SPDX-License-Identifier: Apache-2.0
"""A native optimizer and its swapped twin on a device that is watched."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import torch

from swap_core import SwapOptimizerConfig, align, update_order
from swap_testkit.torch import CpuAsDevice, TorchRecordingDevice, assert_same_bits, record_updates
from swap_torch import swap_optimizer

torch.set_num_threads(1)

PARAMETERS = [
    ((7,), torch.float32),
    ((5, 3), torch.float32),
    ((40,), torch.bfloat16),
    ((2, 2, 2), torch.float64),
    ((129,), torch.float32),
    ((11,), torch.float32),
]


class Twins:
    """Two AdamWs with the same parameters and gradients. Each parameter is a batch.

    Args:
        packed: Which pipeline.
        options: Of the :class:`CpuAsDevice`.
    """

    def __init__(self, *, packed: bool, **options: Any) -> None:
        self.packed = packed
        self.inner = CpuAsDevice(**options)
        self.device = TorchRecordingDevice(self.inner)
        self.native, self.swapped = _adamw(), _adamw()
        config = SwapOptimizerConfig(swap_times=99, min_numel=1, packed_swap=packed)
        swap_optimizer(self.swapped, config, device=self.device)
        record_updates(self.swapped, self.device)
        self.steps = 0
        self.host_waits = 0
        """How often the host waited inside an update."""

    def step(self, *, read: bool = True) -> None:
        """Update both; read the states, and raise ``AssertionError`` if a bit differs.

        Args:
            read: False leaves the stores in flight and compares nothing.
        """
        generator = torch.Generator().manual_seed(self.steps)
        for p, q in zip(*map(_parameters, (self.native, self.swapped)), strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            q.grad = p.grad.clone()
        self.native.step()
        begin = len(self.device.log)
        self.swapped.step()
        self.steps += 1
        ops = self.device.log[begin:]
        self.host_waits += sum(op.verb == "synchronize" for op in ops)
        if not read:
            return
        _ = self.swapped.state  # waits for the stores
        self.device.note_host_read(
            [region for op in ops if op.verb == "copy_out" for region in op.writes]
        )
        assert_same_bits(self.native, self.swapped)

    def order(self) -> Sequence[int]:
        """The parameter of each batch, as they are updated."""
        spans = [2 * align(p.nbytes) for p in _parameters(self.native)]
        return update_order(spans) if self.packed else range(len(spans))

    def miscounts(self) -> list[str]:
        """What was held, moved or waited for against the formula."""
        values = [2 * p.nbytes for p in _parameters(self.native)]
        spans = [2 * align(_parameters(self.native)[position].nbytes) for position in self.order()]
        arenas = max(spans[0::2]) + max(spans[1::2])
        adjacent = max(map(sum, pairwise(values)))
        copies = self.steps * len(PARAMETERS) * (1 if self.packed else 2)
        expected = {
            "held": (self.inner.held_bytes, 0),
            "peak": (self.inner.peak_bytes, arenas if self.packed else adjacent),
            "copies in": (self.inner.copies_in, copies),
            "copies out": (self.inner.copies_out, copies),
            "host waits": (self.host_waits, 0),
        }
        return [f"{key} {a}, not {b}" for key, (a, b) in expected.items() if a != b]


MakeTwins: TypeAlias = Callable[..., Twins]


def _adamw() -> torch.optim.AdamW:
    generator = torch.Generator().manual_seed(0)
    return torch.optim.AdamW(
        [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape, dtype in PARAMETERS
        ],
        lr=0.1,
        foreach=False,
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return optimizer.param_groups[0]["params"]


# Test modules cannot import each other under importlib mode, so fixtures hand things out.


@pytest.fixture
def make_twins() -> MakeTwins:
    """The class :class:`Twins`."""
    return Twins


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    """The module ``planted.py`` beside this file."""
    path = Path(__file__).with_name("planted.py")
    spec = importlib.util.spec_from_file_location("swap_testkit_tests_planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
