# SPDX-License-Identifier: Apache-2.0
"""What the checker found, and what was counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swap_testkit.torch.simulator import device_module
from swap_testkit.torch.simulator.control import operators
from swap_testkit.torch.simulator.settings import Race

__all__ = [
    "fallbacks",
    "host_read",
    "host_write",
    "pinned_bytes",
    "pinned_peak_bytes",
    "queued_operations",
    "race_count",
    "races",
    "raise_on_race",
    "reset",
    "strict_free",
]


def reset() -> None:
    """Wait for everything; forget races, maxima of memory, and memory that nobody has."""
    for index in range(device_module.device_count()):
        device_module.synchronize(index)
        device_module.reset_peak_memory_stats(index)
    device_module.empty_cache()
    operators().reset_pinned_peak()
    races()


def races(clear: bool = True) -> list[Race]:
    """What the checker found so far; the first 1,000.

    Args:
        clear: Forget them.
    """
    return [Race(*line.split("\x1f")) for line in operators().races(clear)]


def race_count() -> int:
    """How many the checker found since :func:`races` cleared them."""
    return int(operators().race_count())


@contextmanager
def raise_on_race() -> Iterator[None]:
    """Within a block, a race raises ``RuntimeError`` from the call that queues the later access.

    One that is found when memory is freed raises from the next call.
    """
    operators().set_raise_on_race(True)
    try:
        yield
    finally:
        operators().set_raise_on_race(False)


@contextmanager
def strict_free() -> Iterator[None]:
    """Within a block, memory must be free of other streams' work when it is freed.

    Otherwise only when it is used again, which is what a device needs. (FSDP2 frees memory that
    another stream still reads, and has its stream wait before the memory is used again.)
    """
    operators().set_strict_free(True)
    try:
        yield
    finally:
        operators().set_strict_free(False)


def host_read(tensor: torch.Tensor) -> None:
    """Tell the checker that the host reads a CPU tensor now, by means that torch does not see.

    Operators on pinned CPU tensors are seen; numpy, ``data_ptr()``, and files are not.
    """
    operators().host_access(tensor, False)


def host_write(tensor: torch.Tensor) -> None:
    """Tell the checker that the host writes a CPU tensor now, by means that torch does not see."""
    operators().host_access(tensor, True)


# Counters.


def fallbacks() -> dict[str, int]:
    """Operators that ran in step with the host so far, and how often.

    Their results have shapes that depend on values, or torch does not know how to compute the
    shapes beforehand. All others were queued.
    """
    return dict(operators().fallbacks())


def queued_operations() -> int:
    """How many operators were queued so far; copies do not count."""
    return int(operators().queued_operations())


def pinned_bytes() -> int:
    """Bytes of pinned host memory now, as the allocator took them (rounding included)."""
    return int(operators().pinned_bytes())


def pinned_peak_bytes() -> int:
    """Most bytes of pinned host memory since :func:`reset`."""
    return int(operators().pinned_peak_bytes())
