# SPDX-License-Identifier: Apache-2.0
"""An optimizer with its adapter, and a native and a swapped one of it that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from swap_core import SwapOptimizerConfig
from swap_testkit.torch.compare import assert_same_bits
from swap_testkit.torch.cpu_device import CopySchedule, CpuAsDevice
from swap_testkit.torch.recording import TorchRecordingDevice
from swap_testkit.torch.trainer import OptimizerFactory
from swap_torch import SwapReport, TorchSwapAdapter, swap_optimizer
from swap_torch.engine import SwapEngine

__all__ = ["LawBrokenError", "Mask", "Pair", "Subject", "engine_of", "law_config", "report_of"]

Mask: TypeAlias = Callable[[int, int], bool]
"""Whether a parameter gets a gradient: by step and position."""


class LawBrokenError(AssertionError):
    """An adapter does not hold to a law; the message names the law and what was found."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An optimizer, and what its adapter is to be tried with.

    Attributes:
        make: Makes the optimizer, unwrapped, from parameters or groups; the same each time.
        adapter: The adapter class; None: the installed one.
        shapes: Of the parameters. Some should have few elements, some the same number.
        dtypes: Of the parameters, one after the other.
        group_options: Options of further parameter groups; they should differ in everything.
    """

    make: OptimizerFactory
    adapter: type[TorchSwapAdapter] | None = None
    shapes: Sequence[tuple[int, ...]] = ((5, 7), (12, 4), (3,), (4, 12), (9, 9), (33,))
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    group_options: Sequence[Mapping[str, Any]] = ({"lr": 0.03},)

    def parameters(self, dtype: torch.dtype | None = None, seed: int = 0) -> list[torch.Tensor]:
        """New parameters with reproducible values."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype or self.dtypes[0]))
            for shape in self.shapes
        ]


def law_config(**fields: Any) -> SwapOptimizerConfig:  # noqa: ANN401  # any of its fields
    """Three batches in which everything swaps that may, unless told otherwise."""
    return SwapOptimizerConfig(**{"min_numel": 2, "swap_times": 3, **fields})


class Pair:
    """A native and a swapped optimizer with the same parameters and gradients.

    Args:
        subject: What they are.
        config: Of the swapped one.
        dtype: Of the parameters.
        grouped: Cut the parameters into groups with ``subject.group_options``.
        native_steps: Steps of both before the second one is wrapped.
    """

    def __init__(
        self,
        subject: Subject,
        config: SwapOptimizerConfig,
        *,
        dtype: torch.dtype | None = None,
        grouped: bool = False,
        native_steps: int = 0,
    ) -> None:
        self.subject = subject
        self.config = config
        # Copies as late as waits allow, and NaN where memory is not loaded.
        self.inner = CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
        self.device = TorchRecordingDevice(self.inner)
        self.native, self.swapped = (self._make(dtype, grouped) for _ in range(2))
        self.steps = 0
        for _ in range(native_steps):
            self._step_both()
        self.wrap(self.swapped)

    def _make(self, dtype: torch.dtype | None, grouped: bool) -> torch.optim.Optimizer:
        params = self.subject.parameters(dtype)
        if not grouped:
            return self.subject.make(params)
        options = [{}, *self.subject.group_options]
        return self.subject.make(
            [
                {"params": params[number :: len(options)], **each}
                for number, each in enumerate(options)
            ]
        )

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let an optimizer swap on the pair's device."""
        return swap_optimizer(
            optimizer, self.config, device=self.device, adapter=self.subject.adapter
        )

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each native parameter with its twin."""
        for one, other in zip(self.native.param_groups, self.swapped.param_groups, strict=True):
            yield from zip(one["params"], other["params"], strict=True)

    def give_gradients(self, mask: Mask | None = None) -> None:
        """Give both the same new gradients, where ``mask`` says so."""
        generator = torch.Generator().manual_seed(1000 + self.steps)
        for position, (p, q) in enumerate(self.pairs()):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            wanted = mask is None or mask(self.steps, position)
            p.grad, q.grad = (grad, grad.clone()) if wanted else (None, None)
        self.steps += 1

    def train(self, steps: int, mask: Mask | None = None) -> None:
        """Step both, and compare after each step."""
        for _ in range(steps):
            self._step_both(mask)
            self.check()

    def _step_both(self, mask: Mask | None = None) -> None:
        self.give_gradients(mask)
        self.native.step()
        self.swapped.step()

    def check(self) -> None:
        """Fail if a bit differs, or if device memory of states is held."""
        assert_same_bits(self.native, self.swapped)
        held = self.inner.held_bytes
        assert held == 0, f"{held} bytes of states are on the device between updates"


def engine_of(optimizer: torch.optim.Optimizer) -> SwapEngine:
    """The engine of a swapped optimizer."""
    engine: SwapEngine = vars(optimizer)["_swap"]
    return engine


def report_of(optimizer: torch.optim.Optimizer) -> SwapReport:
    """The report of a swapped optimizer."""
    return engine_of(optimizer).report(optimizer.state)
