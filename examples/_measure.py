# SPDX-License-Identifier: Apache-2.0
"""What is measured of a training, in the same way whether its optimizer swaps or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from swap_torch import DeviceMemory, TorchSwapDevice


@dataclass
class Timeline:
    """One step. Times are seconds on the host's clock; bytes are of optimizer states."""

    phases: tuple[float, ...] = ()  # the start, the ends of forward, backward and update
    stay: int = 0  # device bytes of states that never leave
    held: list[tuple[float, int]] = field(default_factory=list)  # of the others, from then on
    stores: list[float] = field(default_factory=list)  # when the store of each batch was queued


@dataclass
class Run:
    """What one training gave. Tensors are copies on the CPU."""

    name: str
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    idle: int = 0  # device bytes of states between updates, at most
    peak: int = 0  # device bytes of states inside an update, at most
    host: int = 0
    allocator: tuple[int, int] | None = None
    last_step: Timeline = field(default_factory=Timeline)
    report: str = ""


class MemoryRecorder:
    """A device for ``swap_optimizer`` that notes how much memory its inner device holds, and when.

    All other verbs go to the inner device unchanged.
    """

    def __init__(self, inner: TorchSwapDevice[Any, Any]) -> None:
        self._inner = inner
        self._host: list[range] = []
        self.held = 0  # device bytes now
        self.peak = 0  # and at most so far
        self.begin_update()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def restore(self, memory: DeviceMemory) -> None:
        before = _storage_bytes(memory)
        self._inner.restore(memory)
        self._note(_storage_bytes(memory) - before)

    def release(self, memory: DeviceMemory) -> None:
        before = _storage_bytes(memory)
        self._inner.release(memory)
        self._note(_storage_bytes(memory) - before)

    def release_behind(self, memory: DeviceMemory, stream: Any) -> None:
        before = _storage_bytes(memory)
        self._inner.release_behind(memory, stream)
        self._note(_storage_bytes(memory) - before)

    def copy_out(self, stream: Any, transfers: Any) -> None:
        self._inner.copy_out(stream, transfers)
        self.timeline.stores.append(perf_counter())

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        block = self._inner.allocate_host(nbytes)
        self._host.append(range(block.data_ptr(), block.data_ptr() + nbytes))
        return block

    def begin_update(self) -> None:
        self.timeline = Timeline(held=[(perf_counter(), self.held)])

    def staying(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of the states that are on the device now. Step counters do not count."""
        return sum(
            value.untyped_storage().nbytes()
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step" and self._is_on_device(value)
        )

    def _is_on_device(self, state: torch.Tensor) -> bool:
        # With the CPU as the device, only the address tells device memory from host memory.
        on_host = any(state.data_ptr() in block for block in self._host)
        return state.device == self._inner.torch_device and not on_host

    def _note(self, change: int) -> None:
        self.held += change
        self.peak = max(self.peak, self.held)
        self.timeline.held.append((perf_counter(), self.held))


def _storage_bytes(memory: DeviceMemory) -> int:
    return sum(storage.nbytes() for storage in memory.storages)


def now(device: torch.device) -> float:
    """Seconds, once everything queued so far is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


def allocator_bytes(device: torch.device) -> tuple[int, int] | None:
    """What the accelerator's allocator counts: bytes now, and at most since this was last asked.

    None on the CPU, and for accelerators whose allocator torch cannot ask.
    """
    if device.type == "cpu":
        return None
    try:
        allocated = torch.accelerator.memory_allocated(device)
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:
        return None
    return allocated, peak
