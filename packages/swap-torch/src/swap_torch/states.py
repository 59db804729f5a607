# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer: which of them swap, and the host memory of those.

``optimizer.state[param][key]`` is the host tensor itself between updates, so whatever reads,
saves, copies or edits it there works on the current values. What is on the device during an update
is private to the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, final

import torch

from swap_core import Ledger, StateReport, StayReason, SwapInternalError, UpdateUnit, place
from swap_torch.adapter import TorchSwapAdapter, TorchUnit
from swap_torch.budget import Budget
from swap_torch.counters import CounterTable
from swap_torch.device import AnyTorchDevice
from swap_torch.eligibility import Eligibility
from swap_torch.forms import copy_values, detached, memories_of, state_nbytes
from swap_torch.homes import Candidate, Homes, HomeTable, dtype_name, names_of
from swap_torch.sharding import local_of, wrap_like
from swap_torch.swapped import SwappedState

__all__ = ["OptimizerState", "StateTable"]

OptimizerState: TypeAlias = defaultdict[torch.Tensor, Any]
"""``optimizer.state``: a defaultdict from parameter to a dict of its states."""


@final
class StateTable:
    """Finds, makes and adopts states; owns the host memory of those that swap.

    Args:
        adapter: Knows the optimizer's states.
        eligibility: Decides which of them swap.
        ledger: Where host memory and views are counted.
        budget: Decides which of those that could swap stay.
    """

    def __init__(
        self,
        adapter: TorchSwapAdapter,
        eligibility: Eligibility,
        ledger: Ledger,
        budget: Budget,
    ) -> None:
        self._adapter = adapter
        self._eligibility = eligibility
        self.budget = budget
        self.homes = HomeTable(adapter, ledger)
        self.counters = CounterTable()
        self.on_device = False
        """Whether all states are on the device for now; homes are kept, and hold old values."""

    def swapped(self, param: torch.Tensor) -> Mapping[str, SwappedState]:
        """The states of ``param`` that swap and exist, in the order of the optimizer's keys."""
        return {} if self.on_device else self.homes.of(param)

    def admit(self, units: Iterable[TorchUnit], state: OptimizerState) -> None:
        """Make sure that every state of these parameters exists and is where it belongs.

        States that do not exist yet are born as zeros: on the host if they swap. States that were
        put into ``state`` by others (from before wrapping, a checkpoint, the user's hands) and
        swap move to the host, and leave the device with the last reference to them.

        Host memory is allocated first, for all, so a failed allocation changes nothing.

        Args:
            units: The parameters, in parameter order.
            state: ``optimizer.state``; entries that do not exist are made.
        """
        # A parameter may be listed twice in a group; its states are the same.
        units = list({unit.param: unit for unit in units}.values())
        self._decide(units)
        for unit in units:
            if not state.get(unit.param):
                group = self._adapter.optimizer.param_groups[unit.adapter_index]
                self._adapter.check_newborn(unit.param, group)
        candidates = list(self._candidates(units, state))
        homes = self._homes(candidates)
        for candidate in candidates:
            home = homes[candidate.name]
            if candidate.exists and candidate.like is not home.shown:
                copy_values(home.host, local_of(candidate.like))
                shown = home.show(candidate.like, state_exists=True)
                state[candidate.unit.param][candidate.key] = shown
        for unit in units:
            if not state.get(unit.param) and not self._adapter.steps_itself:
                state[unit.param].update(self._newborn(unit, homes))
        self._gather_counters(units, state)
        self.homes.settle(homes)

    def adopt(self, state: OptimizerState) -> None:
        """Move states that exist, of whatever parameter, to where they belong."""
        self.admit([unit for unit in self._all_units() if state.get(unit.param)], state)

    def notice_moves(self, state: OptimizerState) -> None:
        """Find states whose tensor is the same object and has its values elsewhere.

        Such as after ``optimizer.state[p][key].data = ...``. They get a new tensor object, which
        makes them states from outside for :meth:`admit`.
        """
        for unit in self.units():
            entry = state.get(unit.param, {})
            for key, home in self.homes.of(unit.param).items():
                shown = home.shown
                if shown is not None and entry.get(key) is shown and not home.is_here(shown):
                    entry[key] = wrap_like(shown, detached(local_of(shown)), state_exists=True)

    def part_with_all_but(self, params: Iterable[torch.Tensor]) -> None:
        """Drop what is known of parameters that left the optimizer.

        Trainers replace parameters by others and hand them the old ones' states: the next ``admit``
        takes such states with the host memory that they have, and frees what nobody took.
        """
        stay = list(params)
        self.homes.part_with_all_but(stay)
        self.budget.keep_only(stay)

    def bytes_that_could_swap(self) -> dict[torch.Tensor, int]:
        """For each parameter that has or may get states, in order."""
        return {
            unit.param: sum(self._swappable_sizes(unit))
            for unit in self.units()
            if unit.param.requires_grad or self.budget.knows(unit.param)
        }

    def host_bytes_needed(self) -> int:
        """What the allocator takes for the states that swap when all of them exist."""
        units = self.units()
        self._decide([unit for unit in units if unit.param.requires_grad])
        lanes: dict[torch.device, tuple[AnyTorchDevice, list[list[int]]]] = {}
        for unit in units:
            sizes = list(self._swappable_sizes(unit)) if not self._stays(unit) else []
            if sizes:
                device = self._device(unit)
                lanes.setdefault(device.torch_device, (device, []))[1].append(sizes)
        return sum(
            sum(map(device.host_rounding.taken, place(units, rounding=device.host_rounding)[1]))
            for device, units in lanes.values()
        )

    def _stays(self, unit: TorchUnit) -> bool:
        """Whether a parameter will have no states, or its states stay within the budget."""
        has_states = unit.param.requires_grad or bool(self.homes.of(unit.param))
        return not has_states or self.budget.keeps(unit.param)

    def _decide(self, active: list[TorchUnit]) -> None:
        """Let the budget decide on parameters that it does not know."""
        if not self.budget.limit:
            return
        if all(self.budget.knows(unit.param) for unit in active):
            return
        sizes = self.bytes_that_could_swap()
        sizes.update((unit.param, sum(self._swappable_sizes(unit))) for unit in active)
        self.budget.decide(sizes)

    def _swappable_sizes(self, unit: TorchUnit) -> Iterator[int]:
        """Bytes of each state of a parameter that could swap, as if it were new."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        param = local_of(unit.param)
        for key in self._adapter.param_keys(unit.param, group):
            like = local_of(self._adapter.template(unit.param, key))
            if self._eligibility.stay_reason(key, param, like, exists=False) is None:
                yield state_nbytes(like)

    def _gather_counters(self, units: Iterable[TorchUnit], state: OptimizerState) -> None:
        if self._adapter.steps_itself:
            return  # It replaces counters as it likes.
        keys = self._adapter.counter_keys()
        if self.counters.gather([state[unit.param] for unit in units], keys):
            every = [state[unit.param] for unit in self._all_units() if state.get(unit.param)]
            self.counters.keep_only(every, keys)

    def candidate(self, unit: TorchUnit, key: str, like: torch.Tensor) -> Candidate | None:
        """A state that is about to be loaded, if it swaps; None if it stays.

        Args:
            unit: Its parameter.
            key: Its name.
            like: A local tensor, possibly without values, as it will be.
        """
        if key in self._adapter.counter_keys() or self._reason(unit, key, like, exists=False):
            return None
        return Candidate(unit, key, like, False, self._device(unit))

    def units(self) -> list[TorchUnit]:
        """Every parameter of the optimizer once, in order, without slots."""
        return list({unit.param: unit for unit in self._all_units()}.values())

    def stay_reason(self, unit: TorchUnit, key: str) -> StayReason | None:
        """Why a state that does not exist yet would stay on the device."""
        return self._reason(unit, key, self._adapter.template(unit.param, key), exists=False)

    # Which states need a home.

    def _candidates(self, units: list[TorchUnit], state: OptimizerState) -> Iterator[Candidate]:
        shared = self._shared_storages(state)
        for unit in units:
            for key, current in self._states_of(unit, state):
                known = self.swapped(unit.param).get(key)
                if current is not None and known is not None and current is known.shown:
                    continue
                exists = current is not None
                like = self._adapter.template(unit.param, key) if current is None else current
                if self._reason(unit, key, like, exists=exists, shared=shared) is None:
                    yield Candidate(unit, key, like, exists, self._device(unit))
                elif known is not None:
                    self.homes.move_out(unit.param, key)

    def _device(self, unit: TorchUnit) -> AnyTorchDevice:
        device = self._eligibility.device_of(local_of(unit.param))
        if device is None:
            raise SwapInternalError("a state swaps without a device")
        return device

    def _states_of(
        self, unit: TorchUnit, state: OptimizerState
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each tensor state that is there, or will be born now (None)."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        entry = state.get(unit.param)
        for key in self._adapter.param_keys(unit.param, group):
            if entry and isinstance(entry.get(key), torch.Tensor):
                yield key, entry[key]
            elif not entry or self._adapter.steps_itself:
                yield key, None

    def _reason(
        self,
        unit: TorchUnit,
        key: str,
        like: torch.Tensor,
        *,
        exists: bool,
        shared: Iterable[int] = (),
    ) -> StayReason | None:
        local = local_of(like)
        reason = self._eligibility.stay_reason(key, local_of(unit.param), local, exists=exists)
        if reason is None and exists and not set(_storage_pointers(local)).isdisjoint(shared):
            return StayReason.SHARES_STORAGE
        if reason is None and self.on_device:
            return StayReason.RELOADED
        if reason is None and self.budget.keeps(unit.param):
            return StayReason.BUDGET
        return reason

    def share_memory(self, state: OptimizerState) -> bool:
        """Whether two states are one, or overlap: then the order of updates matters."""
        return bool(self._shared_storages(state))

    def _shared_storages(self, state: OptimizerState) -> set[int]:
        """Storages that two states of the optimizer have in common."""
        counts = Counter(
            pointer
            for unit in self.units()
            for _, current in self._states_of(unit, state)
            if current is not None and local_of(current).layout is torch.strided
            for pointer in _storage_pointers(local_of(current))
        )
        return {pointer for pointer, count in counts.items() if count > 1 and pointer != 0}

    def _all_units(self) -> Iterator[TorchUnit]:
        for group_index, group in enumerate(self._adapter.optimizer.param_groups):
            for param in group["params"]:
                yield UpdateUnit(param, group_index, 0, ())

    # Giving them one.

    def _homes(self, candidates: list[Candidate]) -> Homes:
        """Host memory for each candidate: where its values are, where they were, or new."""
        by_shown = self.homes.by_shown()
        homes: Homes = {}
        lacking: list[Candidate] = []
        for candidate in candidates:
            # A state that is shown already, of another parameter or key: values move with it.
            home = by_shown.get(id(candidate.like)) if candidate.exists else None
            if home is None:
                home = self._reusable(self.homes.of(candidate.unit.param).get(candidate.key))
            if home is not None and home.fits(candidate.form, candidate.device):
                homes[candidate.name] = home
            else:
                lacking.append(candidate)
        return homes | self.homes.allocate(lacking)

    @staticmethod
    def _reusable(home: SwappedState | None) -> SwappedState | None:
        """``home``, unless somebody still has its values: they would change under their eyes."""
        return None if home is None or home.is_held else home

    def _newborn(self, unit: TorchUnit, homes: Homes) -> dict[str, Any]:
        """All states of a parameter that is updated for the first time, zeros, in native order."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        entry = self._adapter.new_counters(unit.param, group)
        for key in self._adapter.state_keys(group):
            like = self._adapter.template(unit.param, key)
            home = homes.get((unit.param, key))
            if home is None:
                entry[key] = torch.zeros_like(like, memory_format=torch.preserve_format)
            else:
                # The memory may be that of an earlier life, if the user emptied the state.
                for memory in home.memories:
                    memory.zero_()
                entry[key] = home.show(like, state_exists=False)
        return entry

    # Telling.

    def report(self, state: OptimizerState) -> list[StateReport]:
        """Describe every state of every parameter of the optimizer."""
        units = list(self._all_units())
        shared, names = self._shared_storages(state), names_of(self._adapter.optimizer)
        return [
            self._state_report(unit, names[unit.param], key, current, shared)
            for unit in units
            for key, current in self._states_of(unit, state)
        ]

    def _state_report(
        self,
        unit: TorchUnit,
        owner: str,
        key: str,
        current: torch.Tensor | None,
        shared: set[int],
    ) -> StateReport:
        like = self._adapter.template(unit.param, key) if current is None else current
        known = self.swapped(unit.param).get(key)
        swaps = known is not None and current is known.shown
        reason = self._reason(unit, key, like, exists=current is not None, shared=shared)
        local = local_of(like)
        return StateReport(
            owner=owner,
            key=key,
            shape=tuple(local.shape),
            dtype=dtype_name(local.dtype),
            nbytes=state_nbytes(local),
            stays=None if swaps else reason,
            born=current is not None,
        )


def _storage_pointers(local: torch.Tensor) -> list[int]:
    return [memory.untyped_storage().data_ptr() for memory in memories_of(local)]
