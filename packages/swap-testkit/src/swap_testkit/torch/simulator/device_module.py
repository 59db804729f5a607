# SPDX-License-Identifier: Apache-2.0
"""The module that torch shows as ``torch.<name>``: what trainers expect of a device's module.

Everything here is torch's generic interface, or the simulator's own random state, by other names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "host_memory_stats",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

Where: TypeAlias = "torch.device | str | int | None"
"""A device of this type, its index, or None for the current one."""

Operators: TypeAlias = Any
"""``torch.ops.swap_simulator``, as csrc/module.cpp defines it."""
Identity: TypeAlias = Any
"""What names a stream that exists, as torch passes it."""

_PRIVATE_USE_1 = 20
"""Its number in c10::DeviceType."""

_process = 0
"""The process that enabled the simulator."""


def _type() -> str:
    return torch._C._get_privateuse1_backend_name()


def _index(where: Where) -> int:
    if isinstance(where, int):
        return where if where >= 0 else current_device()
    index = None if where is None else torch.device(where).index
    return current_device() if index is None else index


def _ops() -> Operators:
    return torch.ops.swap_simulator


# Devices.


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Always: there is nothing to initialise."""
    return True


def init() -> None:
    """Nothing to do."""


def _note_process() -> None:
    """Called by the process that enables the simulator."""
    global _process
    _process = os.getpid()


def _lazy_init() -> None:
    """What torch calls at first use; before that it skips synchronisation."""


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from the one that enabled the simulator."""
    return os.getpid() != _process


def device_count() -> int:
    """How many devices there are."""
    # Not torch.accelerator.device_count(), which asks this module.
    return int(_ops().device_count())


def current_device() -> int:
    """The index of the calling thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(where: Where) -> None:
    """Choose the calling thread's device."""
    torch.accelerator.set_device_index(_index(where))


class device(AbstractContextManager[None]):  # noqa: N801  # the name that torch.cuda has
    """Choose another device within a block."""

    def __init__(self, where: Where) -> None:
        self._wanted = _index(where)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._wanted)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


@dataclass(frozen=True, slots=True)
class _Properties:
    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def get_device_name(where: Where = None) -> str:  # they are all alike
    """A name for logs."""
    return f"Simulated accelerator ({_type()})"


def get_device_properties(where: Where = None) -> _Properties:
    """Name and memory of a device."""
    return _Properties(get_device_name(where), mem_get_info(where)[1])


def is_bf16_supported() -> bool:
    """The CPU's kernels do."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """None: autocast is not simulated, and torch says so and switches it off."""
    return []


# Streams and events.


class Stream(torch.Stream):
    """A :class:`torch.Stream` of this device."""

    def __new__(cls, device: Where = None, priority: int = 0, **identity: Identity) -> Stream:
        """Take a stream of the pool, or with ``stream_id`` and so on one that exists."""
        if identity:
            return super().__new__(cls, priority=priority, **identity)
        where = torch.device(_type(), _index(device))
        return super().__new__(cls, device=where, priority=priority)


class Event(torch.Event):
    """A :class:`torch.Event` of this device."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        """Make an event; it belongs to the device on which it is first recorded."""
        if interprocess:
            raise NotImplementedError("simulator: events between processes are not simulated")
        return super().__new__(cls, device=_type(), enable_timing=enable_timing, blocking=blocking)


def current_stream(where: Where = None) -> torch.Stream:
    """The calling thread's stream."""
    return torch.accelerator.current_stream(torch.device(_type(), _index(where)))


def default_stream(where: Where = None) -> torch.Stream:
    """The stream that a thread begins with."""
    return torch.Stream(stream_id=0, device_index=_index(where), device_type=_PRIVATE_USE_1)


def set_stream(stream: torch.Stream) -> None:
    """Change the calling thread's stream."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Change the calling thread's stream within a block."""
    return nullcontext() if stream is None else stream


def synchronize(where: Where = None) -> None:
    """Block the host until everything that was queued on a device is done."""
    torch.accelerator.synchronize(torch.device(_type(), _index(where)))


# Memory, in bytes.


def memory_allocated(where: Where = None) -> int:
    """Bytes that tensors have."""
    return torch.accelerator.memory_allocated(_index(where))


def max_memory_allocated(where: Where = None) -> int:
    """Most bytes that tensors had."""
    return torch.accelerator.max_memory_allocated(_index(where))


def memory_reserved(where: Where = None) -> int:
    """Bytes that tensors have, or had and can have again."""
    return torch.accelerator.memory_reserved(_index(where))


def max_memory_reserved(where: Where = None) -> int:
    """Most of those."""
    return torch.accelerator.max_memory_reserved(_index(where))


def memory_stats(where: Where = None) -> dict[str, Any]:
    """All counters, by the names that ``torch.cuda.memory_stats`` uses."""
    return dict(torch.accelerator.memory_stats(_index(where)))


def reset_peak_memory_stats(where: Where = None) -> None:
    """Let the maxima begin anew."""
    torch.accelerator.reset_peak_memory_stats(_index(where))


def reset_accumulated_memory_stats(where: Where = None) -> None:
    """Let the sums begin anew."""
    torch.accelerator.reset_accumulated_memory_stats(_index(where))


def mem_get_info(where: Where = None) -> tuple[int, int]:
    """Free and total bytes; without a limit the total is 64 GiB."""
    free, total = torch.accelerator.get_memory_info(_index(where))
    return free, total


def empty_cache() -> None:
    """Wait for everything, and give memory that nobody has back to the system."""
    torch.accelerator.empty_cache()


def host_memory_stats() -> dict[str, int]:
    """Bytes of pinned host memory, now and at most, as the allocator took them."""
    return {
        "allocated_bytes.current": _ops().pinned_bytes(),
        "allocated_bytes.peak": _ops().pinned_peak_bytes(),
    }


# Random numbers. The state of a device is 16 bytes: seed and offset.


def get_rng_state(where: Where = None) -> torch.Tensor:
    """The state of a device's generator: 16 bytes, uint8, on the CPU."""
    state: torch.Tensor = _ops().rng_state(_index(where))
    return state


def set_rng_state(state: torch.Tensor, where: Where = None) -> None:
    """Set what :func:`get_rng_state` gave."""
    _ops().set_rng_state(_index(where), state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _seed_device(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices."""
    for index in range(device_count()):
        _seed_device(index, seed)


def seed() -> None:
    """Seed the current device with a number that nobody knows."""
    manual_seed(int.from_bytes(os.urandom(7), "little"))


def seed_all() -> None:
    """Seed all devices with a number that nobody knows."""
    manual_seed_all(int.from_bytes(os.urandom(7), "little"))


def initial_seed() -> int:
    """The seed of the current device."""
    return int.from_bytes(get_rng_state().numpy().tobytes()[:8], "little")


def _seed_device(index: int, seed: int) -> None:
    seed &= (1 << 64) - 1
    _ops().set_seed(index, seed - (1 << 64) if seed >> 63 else seed)
