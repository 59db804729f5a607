# SPDX-License-Identifier: Apache-2.0
"""Twins: a native and a swapped optimizer that get the same parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer

SHAPES = ((33, 17), (5,), (4, 8, 3, 3), (9, 64), (7,), (10, 3))
Make: TypeAlias = Callable[[list[Parameter]], nn.Optimizer]


def parameters(
    dtype: Any = ms.float32, shapes: Sequence[Sequence[int]] = SHAPES, seed: int = 0
) -> list[Parameter]:
    """Named as layers name theirs: natively ``beta`` and ``gamma`` do not decay."""
    values = np.random.default_rng(seed)
    return [
        Parameter(
            Tensor(values.standard_normal(shape).astype(np.float32) * 0.1).astype(dtype),
            name=f"layer{i}.{'weight' if i % 2 == 0 else 'beta'}",
        )
        for i, shape in enumerate(shapes)
    ]


def gradients(params: Sequence[Parameter], step: int) -> tuple[Tensor, ...]:
    """Random, the same for each step whatever the dtype."""
    values = np.random.default_rng(1000 + step)
    return tuple(
        Tensor(values.standard_normal(p.shape).astype(np.float32)).astype(p.dtype) for p in params
    )


def bits_of(optimizer: nn.Optimizer) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every parameter, state and counter, by name."""
    everything = {p.name: p for p in optimizer.parameters}
    everything |= {p.name: p for p in optimizer.get_parameters()}
    return {name: (str(p.dtype), p.asnumpy().tobytes()) for name, p in everything.items()}


def states_of(optimizer: nn.Optimizer) -> list[Parameter]:
    """Every moment, and ``vhat`` with AMSGrad."""
    if isinstance(optimizer, nn.Adam):
        vhat = optimizer.vhat if optimizer.use_amsgrad else ()
        return [*optimizer.moment1, *optimizer.moment2, *vhat]
    return [*optimizer.moments1, *optimizer.moments2]


def device_bytes(optimizer: Any) -> int:
    """Bytes that the storages of swapped states have on the device, counted one by one."""
    tables = optimizer._swap._table._swapped.values()
    return sum(s.device.untyped_storage().nbytes() for states in tables for s in states)


@dataclass
class Twins:
    """Two optimizers that must agree bit for bit after every step."""

    native: nn.Optimizer
    swapped: Any
    steps: int = field(default=0)

    def step(self, count: int = 1) -> None:
        """Update both with the same gradients; they must agree after each update."""
        for _ in range(count):
            for optimizer in (self.native, self.swapped):
                optimizer(gradients(optimizer.parameters, self.steps))
            self.steps += 1
            self.check()

    def check(self) -> None:
        """Fail if they differ in a bit, or if the swapped one holds device memory."""
        assert bits_of(self.swapped) == bits_of(self.native)
        assert device_bytes(self.swapped) == 0
        assert self.swapped.swap_report().idle_device_bytes == 0


def make_twins(
    make: Make,
    *,
    dtype: Any = ms.float32,
    shapes: Sequence[Sequence[int]] = SHAPES,
    device: Any = None,
    **config: Any,
) -> Twins:
    """Make a native optimizer and its swapped twin, on a device that poisons what it frees."""
    options = SwapOptimizerConfig(**{"min_numel": 0, "swap_times": 3, **config})
    other = swap_optimizer(
        make(parameters(dtype, shapes)), options, device=device or HostDevice(poison=True)
    )
    return Twins(make(parameters(dtype, shapes)), other)
