# SPDX-License-Identifier: Apache-2.0
"""Measure what state dicts cost: time, and host memory beside the states.

CPU tensors play the device, so copies between host and device cost what a memcpy costs.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from bench_common import write_json
from rich.console import Console
from rich.table import Table

from swap_core import format_bytes
from swap_testkit.torch import CpuAsDevice
from swap_torch import swap_optimizer


class Training:
    """An AdamW over ``count`` matrices, native or swapped, that was trained for two steps."""

    def __init__(self, count: int, *, swap: bool) -> None:
        self.device = CpuAsDevice()
        self.params = [torch.nn.Parameter(torch.randn(256, 1024)) for _ in range(count)]
        self.optimizer = torch.optim.AdamW(self.params, fused=True)
        if swap:
            swap_optimizer(self.optimizer, device=self.device)
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.step()
        self.step()

    def step(self) -> None:
        """Update, and wait for the stores."""
        self.optimizer.step()
        self.optimizer.state  # noqa: B018

    def save(self) -> None:
        """Write a state dict to memory and drop it."""
        torch.save(self.optimizer.state_dict(), io.BytesIO())


def seconds(act: Callable[[], object]) -> float:
    """The time of one call."""
    start = perf_counter()
    act()
    return perf_counter() - start


def best(act: Callable[[], object], repeats: int) -> float:
    """The least time of several calls."""
    return min(seconds(act) for _ in range(repeats))


def held_step(training: Training) -> float:
    """An update while a state dict of the step before is held."""
    held = training.optimizer.state_dict()
    time = seconds(training.step)
    assert held["state"]
    return time


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=96, help="matrices of 256 x 1024 (96)")
    parser.add_argument("--repeats", type=int, default=7, help="calls of which the best counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = [Training(options.count, swap=swap) for swap in (False, True)]
    states = sides[1].device.host_bytes
    rows: list[tuple[str, Callable[[Training], object], Callable[[Training], float] | None]] = [
        ("step()", Training.step, None),
        ("state_dict()", lambda t: t.optimizer.state_dict(), None),
        ("torch.save(state_dict()) to memory", Training.save, None),
        ("step() while a state dict of the step before is held", Training.step, held_step),
        ("load_state_dict()", lambda t: t.optimizer.load_state_dict(saved), None),
    ]
    saved = torch.load(_file(sides[0]), weights_only=True)
    table = Table(title=f"{format_bytes(states)} of states, {options.count} parameters; ms")
    for column in ("", "native", "swapped"):
        table.add_column(column)
    results = {}
    for name, act, measure in rows:
        times = [
            min(measure(side) for _ in range(options.repeats))
            if measure is not None
            else best(lambda side=side, act=act: act(side), options.repeats)  # type: ignore[misc]
            for side in sides
        ]
        results[name] = dict(
            zip(("native_ms", "swapped_ms"), (1e3 * t for t in times), strict=True)
        )
        table.add_row(name, *(f"{1e3 * time:.2f}" for time in times))
    Console().print(table)
    training = sides[1]
    extra = training.device.host_bytes
    held = [training.optimizer.state_dict() for _ in range(3)]
    told = [f"three state dicts taken: {format_bytes(training.device.host_bytes - extra)}"]
    training.step()
    told.append(f"after a step: {format_bytes(training.device.host_bytes - extra)}")
    held.clear()
    told.append(f"dropped: {format_bytes(training.device.host_bytes - extra)}")
    print("host memory beside the states:", "; ".join(told))
    write_json(options.json, {"state_bytes": states, "results": results, "host_memory": told})


def _file(training: Training) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(training.optimizer.state_dict(), file)
    file.seek(0)
    return file


if __name__ == "__main__":
    main()
