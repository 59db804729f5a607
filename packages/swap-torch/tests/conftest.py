# SPDX-License-Identifier: Apache-2.0
"""Twins: a native and a swapped optimizer that get the same parameters and gradients."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch

from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

torch.set_num_threads(1)

Source: TypeAlias = Sequence[Any] | Callable[[], Iterable[Any]]
"""Shapes, tensors, or group dicts with those; or a function that makes parameters or groups."""
Mask: TypeAlias = Callable[[int, int], bool] | Sequence[bool] | None
"""Whether a parameter gets a gradient: by step and position, or the same in every step."""


@dataclass
class Twins:
    """Two optimizers that must agree bit for bit after every step."""

    native: torch.optim.Optimizer
    swapped: torch.optim.Optimizer
    device: Any
    """What the swapped one swaps on."""
    steps: int = field(default=0)
    """How many times gradients were given; decides their values."""

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each native parameter with its twin, in order of groups."""
        for one, other in zip(self.native.param_groups, self.swapped.param_groups, strict=True):
            yield from zip(one["params"], other["params"], strict=True)

    def give_gradients(self, mask: Mask = None) -> None:
        """Give both the same new gradients; None where ``mask`` says so or if frozen."""
        generator = torch.Generator().manual_seed(1000 + self.steps)
        for position, (p, q) in enumerate(self.pairs()):
            grad = random_like(p, generator)
            wanted = mask is None or (
                mask(self.steps, position) if callable(mask) else mask[position]
            )
            wanted = wanted and p.requires_grad
            p.grad, q.grad = (grad, grad.clone()) if wanted else (None, None)
        self.steps += 1

    def check(self) -> None:
        """Fail if they differ in a bit, or if the swapped one holds device memory."""
        assert_same_bits(self.native, self.swapped)
        assert getattr(self.device, "held_bytes", 0) == 0


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values in the shape, strides and dtype of ``tensor``; the same for each dtype."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    values = torch.randn(tensor.shape, generator=generator, dtype=wide)
    return torch.empty_like(tensor.detach()).copy_(values)


def cpu_device(**options: Any) -> CpuAsDevice:
    """The harshest device: copies run as late as waits allow, memory not yet loaded is NaN."""
    return CpuAsDevice(**{"schedule": CopySchedule.LATEST, "poison": True, **options})


def make_twins(
    source: Source,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    config: SwapOptimizerConfig | None = None,
    device: Any = None,
    native_steps: int = 0,
    prepare: Callable[[torch.optim.Optimizer], object] | None = None,
    **options: Any,
) -> Twins:
    """Make a native optimizer and its swapped twin.

    Args:
        source: The parameters. A function is called once for each twin.
        optimizer_class: Of both.
        dtype: Of the parameters that are given as shapes; several: used in turn.
        config: None: ``min_numel=0``, so that small tensors swap, and three batches.
        device: None: :func:`cpu_device`.
        native_steps: Steps of both before the second one is wrapped.
        prepare: Called with each of both after that, still before wrapping.
        options: For the optimizers. Tensors in it are copied, so that the twins share none.
    """
    device = cpu_device() if device is None else device
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    native, other = (
        optimizer_class(_parameters(source, dtypes), **copy.deepcopy(options)) for _ in range(2)
    )
    twins = Twins(native, other, device)
    for _ in range(native_steps):
        twins.give_gradients()
        native.step()
        other.step()
    if prepare is not None:
        prepare(native)
        prepare(other)
    swap_optimizer(other, config or SwapOptimizerConfig(min_numel=0, swap_times=3), device=device)
    twins.check()
    return twins


def _parameters(source: Source, dtypes: list[torch.dtype]) -> list[Any]:
    if callable(source):
        return list(source())
    generator = torch.Generator().manual_seed(0)
    count = 0

    def parameter(item: Any) -> torch.Tensor:
        nonlocal count
        if not isinstance(item, torch.Tensor):
            item = random_like(torch.empty(item, dtype=dtypes[count % len(dtypes)]), generator)
        count += 1
        return torch.nn.Parameter(item.detach().clone())

    def entry(item: Any) -> Any:
        if isinstance(item, dict):
            return {**copy.deepcopy(item), "params": [parameter(p) for p in item["params"]]}
        return parameter(item)

    return [entry(item) for item in source]


def train_twins(twins: Twins, steps: int, mask: Mask = None) -> None:
    """Step both with the same gradients; they must agree after each step."""
    for _ in range(steps):
        twins.give_gradients(mask)
        twins.native.step()
        twins.swapped.step()
        twins.check()


@pytest.fixture
def twins() -> Callable[..., Twins]:
    """:func:`make_twins`."""
    return make_twins


@pytest.fixture
def train() -> Callable[..., None]:
    """:func:`train_twins`."""
    return train_twins


@pytest.fixture
def foreach_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make foreach=None mean foreach on the CPU, as it does on accelerators."""
    module = sys.modules["torch.optim.optimizer"]  # torch.optim does not show it
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
