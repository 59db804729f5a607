# SPDX-License-Identifier: Apache-2.0
"""Switch the simulated accelerator on, and set how it behaves."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from swap_testkit.torch.simulator import device_module
from swap_testkit.torch.simulator.build import build
from swap_testkit.torch.simulator.settings import Link, Quirks, Schedule

__all__ = [
    "enable",
    "enabled_name",
    "mark_private_format",
    "operators",
    "scheduled",
    "set_memory_limit",
    "set_pinned_limit",
    "set_quirks",
    "set_schedule",
]

_UNNAMED = "privateuseone"

Operators: TypeAlias = Any
"""``torch.ops.swap_simulator``, as csrc/module.cpp defines it."""


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

    Compiled on first use (see :mod:`swap_testkit.torch.simulator.build`). Call it before the first
    ``backward()`` of the process: autograd then makes a thread for each device that there is. A
    process has one kind of such devices for its whole life; called again, it sets the other
    arguments anew.

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
    torch.ops.swap_simulator.start(devices)
    torch._register_device_module(name, device_module)  # type: ignore[no-untyped-call]  # torch
    generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_stop)
    device_module._note_process()
    torch.empty(0, device=name)  # torch's own initialisation, which it puts off until then
    _enabled = wanted


def _stop() -> None:
    """Let the process end cleanly, with its queues empty and its threads joined."""
    if not device_module._is_in_bad_fork():  # which has the queues, and none of the threads
        torch.ops.swap_simulator.stop()


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
    if name in vars(torch):
        raise ValueError(f"simulator: name={name!r} is not accepted: torch.{name} exists.")


def operators() -> Operators:
    """The compiled operators.

    Raises:
        RuntimeError: the simulator is not enabled.
    """
    if _enabled is None:
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
    operators().set_link(link.to_device or 0.0, link.to_host or 0.0, link.latency)
    operators().set_schedule(schedule.value, seed)


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
    if nbytes is not None and nbytes < 0:
        raise ValueError(
            f"simulator: a limit of {nbytes} bytes is not accepted; give >= 0, or None."
        )
    for index in range(device_module.device_count()) if device is None else (device,):
        operators().set_memory_limit(index, -1 if nbytes is None else nbytes)


def set_pinned_limit(nbytes: int | None) -> None:
    """Limit pinned host memory; more is a ``RuntimeError``. None: no limit."""
    operators().set_pinned_limit(-1 if nbytes is None else nbytes)


def set_quirks(quirks: Quirks) -> None:
    """Choose what is imitated, from the next allocation on."""
    operators().set_quirks(
        quirks.memory_rounding,
        quirks.resize_checks,
        quirks.pinned_power_of_two,
        quirks.fused_ignores_scaler,
    )


def mark_private_format(tensor: torch.Tensor, on: bool = True) -> None:
    """Let the storage of ``tensor`` count as one in a private format of the device (NZ and so on).

    With :attr:`Quirks.resize_checks` it cannot be resized.
    """
    operators().set_private_format(tensor, on)
