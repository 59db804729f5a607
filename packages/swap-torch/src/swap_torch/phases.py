# SPDX-License-Identifier: Apache-2.0
"""Where states are between updates: ``reload()`` and ``offload()``.

Reinforcement learning alternates between phases that need the device for something else and phases
of many updates; other code wants to touch states on the device. Host memory is kept while states
are on the device: to allocate pinned memory for each phase would take longer than the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import Any, final

import torch

from swap_core import format_bytes
from swap_torch.adapter import TorchSwapAdapter, TorchUnit
from swap_torch.device import AnyTorchDevice
from swap_torch.forms import copy_values
from swap_torch.selection import OptimizerState
from swap_torch.sharding import local_of, wrap_like
from swap_torch.snapshot import host_copies
from swap_torch.states import StateTable

__all__ = ["Phase", "Phases"]


class Phase(Enum):
    """Where states are between updates."""

    SWAPPED = "swapped"
    """Those that swap are on the host, the others on the device."""
    ON_DEVICE = "on the device"
    """All are on the device, and updates move nothing."""
    OFFLOADED = "offloaded"
    """All are on the host, until the next update."""


@final
class Phases:
    """Moves all states of one optimizer.

    Args:
        adapter: Knows the optimizer's states.
        table: Knows where they are.
        phase: Where they are now.
    """

    def __init__(self, adapter: TorchSwapAdapter, table: StateTable, phase: Phase) -> None:
        self._adapter = adapter
        self._table = table
        self.phase = phase
        self._parked: dict[tuple[torch.Tensor, str], torch.device] = {}
        """While offloaded: where states were that stay. Not known after unpickling."""

    def enter(self, phase: Phase, state: OptimizerState) -> None:
        """Bring states to where they are in ``phase``. Blocks until they are there.

        Stores must be done. Any number of times, also without states; nothing changes if it raises.

        Raises:
            torch.OutOfMemoryError: the device, or the host, has no room for all of them.
        """
        if self.phase is phase:
            return
        self.resume(state)
        if phase is Phase.ON_DEVICE:
            self._load(state)
        before = self._table.selection.on_device
        self._table.selection.on_device = phase is Phase.ON_DEVICE
        try:
            self._table.adopt(state)
        except BaseException:
            self._table.selection.on_device = before
            raise
        self.phase = phase
        self.park(state)

    def resume(self, state: OptimizerState) -> None:
        """Before an update: states that stay on the device are there again."""
        if self.phase is not Phase.OFFLOADED:
            return
        moved = [
            (entry, key, wrap_like(value, local_of(value).to(home), state_exists=True))
            for unit, entry, key, value in self._staying(state)
            if local_of(value).device != (home := self._home(unit, key))
        ]
        for entry, key, value in moved:
            entry[key] = value
        self._parked.clear()
        self.phase = Phase.SWAPPED

    def let_stay(self, params: Set[torch.Tensor], state: OptimizerState) -> None:
        """Bring the states of some parameters to the device, where they belong from now on.

        Stores must be done. Blocks until they are there.

        Args:
            params: Those that the budget keeps.
            state: ``optimizer.state``.

        Raises:
            torch.OutOfMemoryError: they do not fit; nothing was moved.
        """
        self._load(state, params)
        self._table.adopt(state)

    def _load(self, state: OptimizerState, only: Set[torch.Tensor] | None = None) -> None:
        """Bring states that swap to the device, all or none; with ``only``, of those parameters."""
        loaded: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        devices: dict[torch.device, AnyTorchDevice] = {}
        for unit in self._table.units():
            if only is not None and unit.param not in only:
                continue
            entry = state.get(unit.param, {})
            for key, home in self._table.swapped(unit.param).items():
                shown = home.shown
                if shown is None or entry.get(key) is not shown:
                    continue
                device = home.device
                try:
                    local = home.form.empty_on(device.torch_device)
                except device.out_of_memory as error:
                    raise torch.OutOfMemoryError(
                        f"{'reload()' if only is None else 'device_budget'}: no device memory for "
                        f"{key} of {home.slot.owner} ({format_bytes(home.slot.nbytes)}). All "
                        f"states that are to stay must fit on {device.torch_device} together; "
                        f"others are brought there batch by batch. Nothing was moved."
                    ) from error
                copy_values(local, home.host, non_blocking=True)
                devices[device.torch_device] = device
                loaded.append((entry, key, wrap_like(shown, local, state_exists=True)))
        for device in devices.values():
            done = device.create_event()
            device.record(done, device.compute_stream())
            device.synchronize(done)
        for entry, key, value in loaded:
            entry[key] = value

    def park(self, state: OptimizerState) -> None:
        """Bring the states that stay to the host, if that is the phase."""
        if self.phase is not Phase.OFFLOADED:
            return
        places = [
            (unit.param, entry, key, value)
            for unit, entry, key, value in self._staying(state)
            if local_of(value).device.type != "cpu"
        ]
        copies = host_copies([value for *_, value in places])
        for (param, entry, key, value), copied in zip(places, copies, strict=True):
            self._parked[param, key] = local_of(value).device
            entry[key] = copied

    def _staying(
        self, state: OptimizerState
    ) -> Iterator[tuple[TorchUnit, dict[str, Any], str, torch.Tensor]]:
        for unit in self._table.units():
            swapped = self._table.swapped(unit.param)
            entry = state.get(unit.param, {})
            for key, value in list(entry.items()):
                if isinstance(value, torch.Tensor) and key not in swapped:
                    yield unit, entry, key, value

    def _home(self, unit: TorchUnit, key: str) -> torch.device:
        """Where a state that stays was, or where native kernels want it."""
        if (unit.param, key) in self._parked:
            return self._parked[unit.param, key]
        fused = self._adapter.optimizer.param_groups[unit.adapter_index].get("fused")
        if key in self._adapter.counter_keys() and not fused:
            return torch.device("cpu")
        return local_of(unit.param).device
