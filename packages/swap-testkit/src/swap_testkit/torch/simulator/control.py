# SPDX-License-Identifier: Apache-2.0
"""Switch the simulated accelerator on, and steer it."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from swap_testkit.torch.simulator import device_module
from swap_testkit.torch.simulator.build import build

__all__ = [
    "NPU_QUIRKS",
    "Link",
    "Quirks",
    "Race",
    "Schedule",
    "enable",
    "enabled_name",
    "fallbacks",
    "host_read",
    "host_write",
    "mark_private_format",
    "pinned_bytes",
    "pinned_peak_bytes",
    "queued_operations",
    "race_count",
    "races",
    "raise_on_race",
    "reset",
    "scheduled",
    "set_memory_limit",
    "set_pinned_limit",
    "set_quirks",
    "set_schedule",
    "strict_free",
]

_UNNAMED = "privateuseone"

Operators: TypeAlias = Any
"""``torch.ops.swap_simulator``, as csrc/module.cpp defines it."""


class Schedule(Enum):
    """When queued work runs. Each is one of the orders that streams, events and waits allow."""

    THREADS = 0
    """A thread for each stream: real concurrency, and the only schedule with a link model."""
    EARLIEST = 1
    """Everything at once."""
    LATEST = 2
    """Everything as late as possible: when the host, or what the host waits for, waits for it."""
    SIDE_STREAMS_FIRST = 3
    """Default streams as late as possible, all others at once."""
    RANDOM = 4
    """In an order that a seed draws from those that are legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A model of the link between host and devices, for :attr:`Schedule.THREADS`.

    Attributes:
        to_device: Bytes per second; None: no limit. One transfer at a time in each direction.
        to_host: The same in the other direction.
        latency: Seconds before each transfer.
    """

    to_device: float | None = None
    to_host: float | None = None
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """What Ascend NPUs with torch_npu do differently, as far as it can be imitated.

    Attributes:
        memory_rounding: Device memory is rounded to (size + 32) up to a multiple of 512, not size.
        pinned_power_of_two: Pinned memory is rounded up to a power of two.
        resize_checks: ``storage.resize_`` refuses storages that :func:`mark_private_format`
            marked, and sizes that are no multiple of the item size; the latter only after the
            contents are gone.
        fused_ignores_scaler: fused AdamW ignores ``grad_scale`` and ``found_inf``.
    """

    memory_rounding: bool = False
    pinned_power_of_two: bool = False
    resize_checks: bool = False
    fused_ignores_scaler: bool = False


NPU_QUIRKS = Quirks(
    memory_rounding=True,
    pinned_power_of_two=True,
    resize_checks=True,
    fused_ignores_scaler=True,
)
"""All of them."""


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of the same bytes that nothing orders, at least one of which writes.

    Attributes:
        operation: What was queued later.
        where: On which stream; or the host.
        access: ``reads``, ``writes`` or ``frees``.
        memory: Which block, and its bytes.
        bytes: Which bytes of it, ``begin:end``, the earlier access touches.
        earlier: What was queued earlier.
        earlier_where: On which stream.
        earlier_access: ``reads`` or ``writes``.
        missing: The wait that is not there.
    """

    operation: str
    where: str
    access: str
    memory: str
    bytes: str
    earlier: str
    earlier_where: str
    earlier_access: str
    missing: str

    def __str__(self) -> str:
        """Tell it in one line."""
        return (
            f"{self.operation} on {self.where} {self.access} {self.memory}, bytes {self.bytes}, "
            f"which {self.earlier} on {self.earlier_where} {self.earlier_access}: {self.missing}"
        )


@dataclass(frozen=True, slots=True)
class _Enabled:
    name: str
    devices: int


_enabled: _Enabled | None = None


def enable(
    name: str = "simnpu",
    *,
    devices: int = 2,
    memory_limit: int | None = None,
    pinned_limit: int | None = None,
    schedule: Schedule = Schedule.EARLIEST,
    seed: int = 0,
    link: Link | None = None,
    quirks: Quirks | None = None,
) -> None:
    """Give this process simulated accelerators of the device type ``name``.

    Compiled on first use (see :func:`swap_testkit.torch.simulator.build`). A process has one kind
    of such devices for its whole life; called again, it sets the other arguments anew.

    Args:
        name: The device type: ``torch.device(name)``, ``tensor.<name>()``, ``torch.<name>``.
            With ``npu``, code that is written for ``torch.npu`` runs.
        devices: How many, >= 1.
        memory_limit: Bytes of each; more is ``torch.OutOfMemoryError``. None: no limit.
        pinned_limit: Bytes of host memory that can be pinned. None: no limit.
        schedule: When queued work runs.
        seed: For :attr:`Schedule.RANDOM`.
        link: For :attr:`Schedule.THREADS`; None: copies take the time they take.
        quirks: None: none.

    Raises:
        RuntimeError: the process has another accelerator of the PrivateUse1 kind (such as
            torch_npu), or was enabled with another name or number of devices.
        ValueError: an argument is not accepted.
        BuildError: no compiler.
    """
    _check(name, devices)
    _start(name, devices)
    set_memory_limit(memory_limit)
    set_pinned_limit(pinned_limit)
    set_quirks(quirks or Quirks())
    set_schedule(schedule, seed=seed, link=link)


def enabled_name() -> str | None:
    """The device type, or None before :func:`enable`."""
    return None if _enabled is None else _enabled.name


def _check(name: str, devices: int) -> None:
    if not (name.isidentifier() and name.islower()):
        raise ValueError(f"simulator: name={name!r} is not accepted; give a lower-case identifier.")
    if type(devices) is not int or not 1 <= devices <= 64:
        raise ValueError(
            f"simulator: devices={devices!r} is not accepted; give an integer from 1 to 64."
        )


def _start(name: str, devices: int) -> None:
    global _enabled
    wanted = _Enabled(name, devices)
    if _enabled == wanted:
        return
    if _enabled is not None:
        raise RuntimeError(
            f"simulator: already enabled as {_enabled.devices} devices of type {_enabled.name!r}; "
            f"a process has one kind of simulated accelerator. Use another process for {wanted}."
        )
    _refuse_second_backend(name)
    torch.ops.load_library(build())  # type: ignore[no-untyped-call]  # torch
    rename_privateuse1_backend(name)
    _ops().start(devices)
    torch._register_device_module(name, device_module)  # type: ignore[no-untyped-call]  # torch
    generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_ops().stop)
    torch.empty(0, device=name)  # torch's own initialisation, which it puts off until then
    _enabled = wanted


def _refuse_second_backend(name: str) -> None:
    """Torch aborts the process if two backends register themselves for PrivateUse1."""
    there = torch._C._get_privateuse1_backend_name()
    taken = torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::empty.memory_format", "PrivateUse1"
    )
    if there != _UNNAMED or taken:
        raise RuntimeError(
            f"simulator: this process already has the accelerator {there!r}, and torch allows one "
            f"of its kind (PrivateUse1) per process. Enable the simulator in a process that does "
            f"not import it (TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from doing so)."
        )
    if hasattr(torch, name):
        raise ValueError(f"simulator: name={name!r} is not accepted: torch.{name} exists.")


def _ops() -> Operators:
    if _enabled is None and not hasattr(torch.ops.swap_simulator, "start"):
        raise RuntimeError("simulator: not enabled; call simulator.enable() first.")
    return torch.ops.swap_simulator


# Steering.


def set_schedule(schedule: Schedule, *, seed: int = 0, link: Link | None = None) -> None:
    """Change when queued work runs, after everything queued so far has run.

    Args:
        schedule: Which.
        seed: For :attr:`Schedule.RANDOM`.
        link: For :attr:`Schedule.THREADS`.

    Raises:
        ValueError: a link with another schedule.
    """
    if link is not None and schedule is not Schedule.THREADS:
        raise ValueError(f"simulator: a link needs Schedule.THREADS, not {schedule}.")
    link = link or Link()
    _ops().set_link(link.to_device or 0.0, link.to_host or 0.0, link.latency)
    _ops().set_schedule(schedule.value, seed)


@contextmanager
def scheduled(schedule: Schedule, *, seed: int = 0, link: Link | None = None) -> Iterator[None]:
    """:func:`set_schedule` within a block; :attr:`Schedule.EARLIEST` after it."""
    set_schedule(schedule, seed=seed, link=link)
    try:
        yield
    finally:
        set_schedule(Schedule.EARLIEST)


def set_memory_limit(nbytes: int | None, device: int | None = None) -> None:
    """Limit the memory of one device, or of all. None: no limit.

    What counts is what tensors have (with rounding) and what ``record_stream`` still keeps; memory
    that is free to be used again does not, so there is no fragmentation.
    """
    for index in range(device_module.device_count()) if device is None else (device,):
        _ops().set_memory_limit(index, -1 if nbytes is None else nbytes)


def set_pinned_limit(nbytes: int | None) -> None:
    """Limit pinned host memory; more is a ``RuntimeError``. None: no limit."""
    _ops().set_pinned_limit(-1 if nbytes is None else nbytes)


def set_quirks(quirks: Quirks) -> None:
    """Choose what is imitated, from the next allocation on."""
    _ops().set_quirks(
        quirks.memory_rounding,
        quirks.resize_checks,
        quirks.pinned_power_of_two,
        quirks.fused_ignores_scaler,
    )


def mark_private_format(tensor: torch.Tensor, on: bool = True) -> None:
    """Let the storage of ``tensor`` count as one in a private format of the device (NZ and so on).

    With :attr:`Quirks.resize_checks` it cannot be resized.
    """
    _ops().set_private_format(tensor, on)


def reset() -> None:
    """Wait for everything; forget races, maxima of memory, and memory that nobody has."""
    for index in range(device_module.device_count()):
        device_module.synchronize(index)
        device_module.reset_peak_memory_stats(index)
    device_module.empty_cache()
    _ops().reset_pinned_peak()
    races()


# The checker.


def races(clear: bool = True) -> list[Race]:
    """What the checker found so far; the first 1,000.

    Args:
        clear: Forget them.
    """
    return [Race(*line.split("\x1f")) for line in _ops().races(clear)]


def race_count() -> int:
    """How many the checker found since :func:`races` cleared them."""
    return int(_ops().race_count())


@contextmanager
def raise_on_race() -> Iterator[None]:
    """Within a block, a race raises ``RuntimeError`` from the call that queues the later access.

    One that is found when memory is freed raises from the next call.
    """
    _ops().set_raise_on_race(True)
    try:
        yield
    finally:
        _ops().set_raise_on_race(False)


@contextmanager
def strict_free() -> Iterator[None]:
    """Within a block, memory must be free of other streams' work when it is freed.

    Otherwise only when it is used again, which is what a device needs. (FSDP2 frees memory that
    another stream still reads, and has its stream wait before the memory is used again.)
    """
    _ops().set_strict_free(True)
    try:
        yield
    finally:
        _ops().set_strict_free(False)


def host_read(tensor: torch.Tensor) -> None:
    """Tell the checker that the host reads a CPU tensor now, by means that torch does not see.

    Operators on pinned CPU tensors are seen; numpy, ``data_ptr()``, and files are not.
    """
    _ops().host_access(tensor, False)


def host_write(tensor: torch.Tensor) -> None:
    """Tell the checker that the host writes a CPU tensor now, by means that torch does not see."""
    _ops().host_access(tensor, True)


# Counters.


def fallbacks() -> dict[str, int]:
    """Operators that ran in step with the host so far, and how often.

    Their results have shapes that depend on values, or torch does not know how to compute the
    shapes beforehand. All others were queued.
    """
    return dict(_ops().fallbacks())


def queued_operations() -> int:
    """How many operators were queued so far; copies do not count."""
    return int(_ops().queued_operations())


def pinned_bytes() -> int:
    """Bytes of pinned host memory now, as the allocator took them (rounding included)."""
    return int(_ops().pinned_bytes())


def pinned_peak_bytes() -> int:
    """Most bytes of pinned host memory since :func:`reset`."""
    return int(_ops().pinned_peak_bytes())
