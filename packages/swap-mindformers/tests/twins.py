# SPDX-License-Identifier: Apache-2.0
"""Twins: a native and a swapped AdamW that get the same parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from swap_mindformers import SwapOptimizerConfig, swap_optimizer
from swap_mindspore import HostDevice
from swap_testkit.mindspore.mindformers import use_fused_standin
from swap_testkit.mindspore.record import array_of

SHAPES = ((33, 17), (5,), (4, 8, 3, 3), (9, 64), (7,), (10, 3))
FP32, BF16, FP16 = (ms.float32,), (ms.bfloat16,), (ms.float16,)
MIXED = (ms.bfloat16, ms.float32, ms.float16)


def parameters(dtypes: Sequence[Any] = BF16, seed: int = 0) -> list[Parameter]:
    """Parameters of these dtypes in turn."""
    values = np.random.default_rng(seed)
    return [
        Parameter(
            Tensor(values.standard_normal(shape).astype(np.float32) * 0.1).astype(
                dtypes[i % len(dtypes)]
            ),
            name=f"layer{i}.weight",
        )
        for i, shape in enumerate(SHAPES)
    ]


def gradients(params: Sequence[Parameter], step: int, dtype: Any = None) -> tuple[Tensor, ...]:
    """Random, the same for each step; in the parameters' dtypes or in another."""
    values = np.random.default_rng(1000 + step)
    return tuple(
        Tensor(values.standard_normal(p.shape).astype(np.float32)).astype(dtype or p.dtype)
        for p in params
    )


def bits_of(optimizer: nn.Optimizer) -> dict[str, tuple[str, str]]:
    """Type and fingerprint of every parameter, master, moment and counter, by name."""
    everything = {p.name: p for p in optimizer.parameters}
    everything |= {p.name: p for p in optimizer.get_parameters()}
    return {name: (str(p.dtype), array_of(p).digest()) for name, p in everything.items()}


def tables(optimizer: Any) -> list[Any]:
    """All swapped states."""
    return list(optimizer._swap._table._all())


def device_bytes(optimizer: Any) -> int:
    """Bytes that swapped states have on the device, storage by storage."""
    devices = [state.device for state in tables(optimizer) if state.device is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in devices)


@dataclass
class Twins:
    """Two optimizers that must agree bit for bit after every step."""

    native: nn.Optimizer
    swapped: Any
    steps: int = field(default=0)
    gradient_dtype: Any = None

    def step(self, count: int = 1) -> None:
        """Update both with the same gradients; they must agree after each update."""
        for _ in range(count):
            for optimizer in (self.native, self.swapped):
                optimizer(gradients(optimizer.parameters, self.steps, self.gradient_dtype))
            self.steps += 1
            self.check()

    def check(self) -> None:
        """Fail if they differ in a bit, or if the swapped one holds device memory."""
        assert bits_of(self.swapped) == bits_of(self.native)
        assert device_bytes(self.swapped) == 0
        assert self.swapped.swap_report().idle_device_bytes == 0


def make_adamw(
    module: ModuleType,
    params: Sequence[Any] | Callable[[list[Parameter]], Sequence[Any]] | None = None,
    *,
    dtypes: Sequence[Any] = BF16,
    seed: int = 0,
    **options: Any,
) -> nn.Optimizer:
    """The real class, with the stand-in for the fused kernel where it is fused."""
    given = parameters(dtypes, seed)
    chosen = params(given) if callable(params) else given
    arguments = {"learning_rate": 0.01, "weight_decay": 0.1, **options}
    optimizer = module.AdamW(chosen, **arguments)
    return use_fused_standin(optimizer) if optimizer.enable_fused_opt else optimizer


def make_twins(
    module: ModuleType,
    *,
    groups: Callable[[list[Parameter]], Sequence[Any]] | None = None,
    dtypes: Sequence[Any] = BF16,
    gradient_dtype: Any = None,
    optimizer: dict[str, Any] | None = None,
    device: Any = None,
    **config: Any,
) -> Twins:
    """Make a native optimizer and its swapped twin, on a device that poisons what it frees."""
    options = SwapOptimizerConfig(**{"min_numel": 0, "swap_times": 3, **config})
    native, other = (
        make_adamw(module, groups, dtypes=dtypes, **(optimizer or {})) for _ in range(2)
    )
    swap_optimizer(other, options, device=device or HostDevice(poison=True))
    return Twins(native, other, gradient_dtype=gradient_dtype)
