# SPDX-License-Identifier: Apache-2.0
"""Ranges for profilers: ``swap.load[i]``, ``swap.update[i]``, ``swap.store[i]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.autograd.profiler import record_function

from swap_core import DeviceDecorator, SwapDevice
from swap_torch.device import DeviceMemory, Transfer
from swap_torch.plan import TorchBatch, TorchPipeline

__all__ = ["in_ranges", "profiler_ranges", "profiler_runs", "update_in_range"]

_asked = False


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Mark copies and updates for a profiler that torch does not know of, inside ``with``.

    Under torch's profilers (``torch.profiler``, ``emit_nvtx``, ``emit_itt``) they always are.
    torch_npu's own profiler, which takes torch's ranges too, does not tell torch that it runs.
    """
    global _asked
    before, _asked = _asked, True
    try:
        yield
    finally:
        _asked = before


def profiler_runs() -> bool:
    """Tell whether ranges are wanted: a look at two variables, in each update."""
    return _asked or torch.autograd.profiler._is_profiler_enabled


@contextmanager
def in_ranges(pipeline: TorchPipeline, batches: Sequence[TorchBatch]) -> Iterator[None]:
    """Put a range around each copy that ``pipeline`` queues inside ``with``.

    Ranges are the host's; a profiler connects them with what the device does.
    """
    inner = pipeline.device
    pipeline.device = _RangedDevice(inner, batches)
    try:
        yield
    finally:
        pipeline.device = inner


def update_in_range(update: Callable[[int], None]) -> Callable[[int], None]:
    """Put a range around each update."""

    def ranged(index: int) -> None:
        with record_function(f"swap.update[{index}]"):
            update(index)

    return ranged


@final
class _RangedDevice(DeviceDecorator[Any, Any, DeviceMemory, Transfer]):
    """Copies in ranges.

    Args:
        inner: The device that does the work.
        batches: Whose copies they are.
    """

    def __init__(
        self, inner: SwapDevice[Any, Any, DeviceMemory, Transfer], batches: Sequence[TorchBatch]
    ) -> None:
        super().__init__(inner)
        self._indices = {id(batch.transfers): batch.index for batch in batches}

    def copy_in(self, stream: Any, transfers: Sequence[Transfer]) -> None:  # noqa: ANN401
        with record_function(f"swap.load[{self._indices[id(transfers)]}]"):
            super().copy_in(stream, transfers)

    def copy_out(self, stream: Any, transfers: Sequence[Transfer]) -> None:  # noqa: ANN401
        with record_function(f"swap.store[{self._indices[id(transfers)]}]"):
            super().copy_out(stream, transfers)
