# SPDX-License-Identifier: Apache-2.0
"""The device ``sim`` of the command line and of scenarios: the simulated accelerator."""

from __future__ import annotations

from swap_testkit.torch.simulator import control, watch
from swap_testkit.torch.simulator.build import build
from swap_testkit.torch.simulator.process_group import register_backend

__all__ = ["SIMULATED", "check_races", "device_type", "prepare"]

SIMULATED = "sim"
"""Asks for simulated accelerators, one for each process of a training."""

_DEVICES = 8
"""As many as a process can have ranks beside it: each takes the one of its number."""


def prepare(device: str) -> None:
    """Compile what ``device`` needs, in the process that starts others, so that none waits for it.

    Raises:
        swap_testkit.torch.simulator.BuildError: no compiler.
    """
    if device == SIMULATED:
        build()


def device_type(device: str) -> str:
    """The type that torch knows ``device`` by; with ``sim``, after enabling the simulator.

    Raises:
        swap_testkit.torch.simulator.BuildError: no compiler.
    """
    if device != SIMULATED:
        return device
    if control.enabled_name() is None:
        control.enable(devices=_DEVICES)
    register_backend()
    return control.enabled_name() or device


def check_races(device: str, what: str) -> None:
    """Raise ``RuntimeError`` if the checker found something while ``what`` ran on ``sim``."""
    if device != SIMULATED:
        return
    count = watch.race_count()
    races = watch.races()
    if races:
        told = "\n".join(f"  {race}" for race in races[:10])
        raise RuntimeError(f"{what} has {count} races on the simulated accelerator:\n{told}")
