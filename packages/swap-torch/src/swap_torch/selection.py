# SPDX-License-Identifier: Apache-2.0
"""Which states of one optimizer swap, and how large they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any, TypeAlias, final

import torch

from swap_core import StayReason, SwapInternalError, UpdateUnit, place
from swap_torch.adapter import TorchSwapAdapter, TorchUnit
from swap_torch.budget import Budget
from swap_torch.device import AnyTorchDevice
from swap_torch.eligibility import Eligibility
from swap_torch.forms import memories_of, shaped, state_nbytes
from swap_torch.sharding import local_of

__all__ = ["OptimizerState", "Selection"]

OptimizerState: TypeAlias = defaultdict[torch.Tensor, Any]
"""``optimizer.state``: a defaultdict from parameter to a dict of its states."""


@final
class Selection:
    """Decides which states of one optimizer swap; holds none of them.

    Args:
        adapter: Knows the optimizer's parameters and states.
        eligibility: Decides which states could swap.
        budget: Decides which of those stay.
    """

    def __init__(self, adapter: TorchSwapAdapter, eligibility: Eligibility, budget: Budget) -> None:
        self._adapter = adapter
        self._eligibility = eligibility
        self.budget = budget
        self.on_device = False
        """Whether all states are on the device for now."""

    def listed(self) -> Iterator[TorchUnit]:
        """Every parameter of the optimizer as its groups list it, without slots."""
        for group_index, group in enumerate(self._adapter.optimizer.param_groups):
            for param in group["params"]:
                yield UpdateUnit(param, group_index, 0, ())

    def units(self) -> list[TorchUnit]:
        """Every parameter of the optimizer once, in order."""
        return list({unit.param: unit for unit in self.listed()}.values())

    def states_of(
        self, unit: TorchUnit, state: OptimizerState
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each tensor state that is there, or will be born at the next update (None)."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        entry = state.get(unit.param)
        for key in self._adapter.param_keys(shaped(unit.param), group):
            if entry and isinstance(entry.get(key), torch.Tensor):
                yield key, entry[key]
            elif not entry or self._adapter.steps_itself:
                yield key, None

    def template(self, unit: TorchUnit, key: str) -> torch.Tensor:
        """What a state that does not exist yet will be like; to look at only."""
        return self._adapter.template(shaped(unit.param), key)

    def stay_reason(
        self,
        unit: TorchUnit,
        key: str,
        like: torch.Tensor,
        *,
        exists: bool,
        shared: Collection[int] = (),
    ) -> StayReason | None:
        """Why a state stays on the device, or None if it swaps.

        Args:
            unit: Its parameter.
            key: Its name.
            like: The state itself, or what it will be like.
            exists: Whether ``like`` is the state itself.
            shared: Storages that several states have in common.
        """
        local = local_of(like)
        reason = self._eligibility.stay_reason(key, local_of(unit.param), local, exists=exists)
        if reason is None and exists and not set(_storage_pointers(local)).isdisjoint(shared):
            return StayReason.SHARES_STORAGE
        if reason is None and self.on_device:
            return StayReason.RELOADED
        if reason is None and self.budget.keeps(unit.param):
            return StayReason.BUDGET
        return reason

    def device_of(self, unit: TorchUnit) -> AnyTorchDevice:
        """The device of a parameter that has states that swap."""
        device = self._eligibility.device_of(local_of(unit.param))
        if device is None:
            raise SwapInternalError("a state swaps without a device")
        return device

    def share_memory(self, state: OptimizerState) -> bool:
        """Whether two states are one, or overlap: then the order of updates matters."""
        return bool(self.shared_storages(state))

    def shared_storages(self, state: OptimizerState) -> set[int]:
        """Addresses of storages that two states of the optimizer have in common."""
        counts = Counter(
            pointer
            for unit in self.units()
            for _, current in self.states_of(unit, state)
            if current is not None and local_of(current).layout is torch.strided
            for pointer in _storage_pointers(local_of(current))
        )
        return {pointer for pointer, count in counts.items() if count > 1 and pointer != 0}

    # Sizes, and the budget.

    def decide(self, active: Iterable[TorchUnit]) -> None:
        """Let the budget decide on those of these parameters that it does not know."""
        active = list(active)
        if not self.budget.limit:
            return
        if all(self.budget.knows(unit.param) for unit in active):
            return
        sizes = self.bytes_that_could_swap()
        sizes.update((unit.param, sum(self._swappable_sizes(unit))) for unit in active)
        self.budget.decide(sizes)

    def bytes_that_could_swap(self) -> dict[torch.Tensor, int]:
        """For each parameter that has or may get states, in order."""
        return {
            unit.param: sum(self._swappable_sizes(unit))
            for unit in self.units()
            if unit.param.requires_grad or self.budget.knows(unit.param)
        }

    def host_bytes_needed(self, having: Container[torch.Tensor]) -> int:
        """What the allocator takes for the states that swap when all of them exist.

        Args:
            having: Parameters that have states that swap already.
        """
        units = self.units()
        self.decide(unit for unit in units if unit.param.requires_grad)
        lanes: dict[torch.device, tuple[AnyTorchDevice, list[list[int]]]] = {}
        for unit in units:
            has_states = unit.param.requires_grad or unit.param in having
            if not has_states or self.budget.keeps(unit.param):
                continue
            if sizes := list(self._swappable_sizes(unit)):
                device = self.device_of(unit)
                lanes.setdefault(device.torch_device, (device, []))[1].append(sizes)
        return sum(
            sum(map(device.host_rounding.taken, place(sizes, rounding=device.host_rounding)[1]))
            for device, sizes in lanes.values()
        )

    def _swappable_sizes(self, unit: TorchUnit) -> Iterator[int]:
        """Bytes of each state of a parameter that could swap, as if it were new."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        param = local_of(unit.param)
        for key in self._adapter.param_keys(shaped(unit.param), group):
            like = local_of(self.template(unit, key))
            if self._eligibility.stay_reason(key, param, like, exists=False) is None:
                yield state_nbytes(like)


def _storage_pointers(local: torch.Tensor) -> list[int]:
    return [memory.untyped_storage().data_ptr() for memory in memories_of(local)]
