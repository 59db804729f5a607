# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer, and the host memory of those that swap.

``optimizer.state[param][key]`` is the host tensor itself between updates, so whatever reads,
saves, copies or edits it there works on the current values. What is on the device during an update
is private to the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch

from swap_core import Ledger, StateReport
from swap_torch.adapter import TorchSwapAdapter, TorchUnit
from swap_torch.counters import CounterTable
from swap_torch.forms import copy_values, detached, state_nbytes
from swap_torch.homes import Candidate, Homes, HomeTable, dtype_name, names_of
from swap_torch.selection import OptimizerState, Selection
from swap_torch.sharding import local_of, wrap_like
from swap_torch.swapped import SwappedState

__all__ = ["StateTable"]


@final
class StateTable:
    """Finds, makes and adopts states; owns the host memory of those that swap.

    Args:
        adapter: Knows the optimizer's states.
        selection: Decides which of them swap.
        ledger: Where host memory and views are counted.
    """

    def __init__(self, adapter: TorchSwapAdapter, selection: Selection, ledger: Ledger) -> None:
        self._adapter = adapter
        self.selection = selection
        self.homes = HomeTable(adapter, ledger)
        self.counters = CounterTable()

    def swapped(self, param: torch.Tensor) -> Mapping[str, SwappedState]:
        """The states of ``param`` that swap and exist, in the order of the optimizer's keys.

        While all states are on the device, homes are kept, and hold old values.
        """
        return {} if self.selection.on_device else self.homes.of(param)

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
        self.selection.decide(units)
        for unit in units:
            if not state.get(unit.param):
                group = self._adapter.optimizer.param_groups[unit.adapter_index]
                self._adapter.check_newborn(unit.param, group)
        candidates = list(self._candidates(units, state))
        homes = self._homes(candidates)
        self._bring_what_stays(units, candidates, state)
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
        self.admit([unit for unit in self.selection.listed() if state.get(unit.param)], state)

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
        self.selection.budget.keep_only(stay)

    def host_bytes_needed(self) -> int:
        """What the allocator takes for the states that swap when all of them exist."""
        having = {unit.param for unit in self.units() if self.homes.of(unit.param)}
        return self.selection.host_bytes_needed(having)

    def _gather_counters(self, units: Iterable[TorchUnit], state: OptimizerState) -> None:
        if self._adapter.steps_itself:
            return  # It replaces counters as it likes.
        keys = self._adapter.counter_keys()
        if self.counters.gather([state[unit.param] for unit in units], keys):
            every = [state[unit.param] for unit in self.selection.listed() if state.get(unit.param)]
            self.counters.keep_only(every, keys)

    def candidate(self, unit: TorchUnit, key: str, like: torch.Tensor) -> Candidate | None:
        """A state that is about to be loaded, if it swaps; None if it stays.

        Args:
            unit: Its parameter.
            key: Its name.
            like: A local tensor, possibly without values, as it will be.
        """
        if key in self._adapter.counter_keys():
            return None
        if self.selection.stay_reason(unit, key, like, exists=False) is not None:
            return None
        return Candidate(unit, key, like, False, self.selection.device_of(unit))

    def units(self) -> list[TorchUnit]:
        """Every parameter of the optimizer once, in order."""
        return self.selection.units()

    # Which states need a home.

    def _candidates(self, units: list[TorchUnit], state: OptimizerState) -> Iterator[Candidate]:
        selection = self.selection
        shared = selection.shared_storages(state)
        for unit in units:
            for key, current in selection.states_of(unit, state):
                known = self.swapped(unit.param).get(key)
                if current is not None and known is not None and current is known.shown:
                    continue
                exists = current is not None
                like = self.selection.template(unit, key) if current is None else current
                if selection.stay_reason(unit, key, like, exists=exists, shared=shared) is None:
                    yield Candidate(unit, key, like, exists, selection.device_of(unit))
                elif known is not None:
                    self.homes.move_out(unit.param, key)

    def _bring_what_stays(
        self, units: list[TorchUnit], candidates: Iterable[Candidate], state: OptimizerState
    ) -> None:
        """States that stay, and were made of what ``optimizer.state`` showed, go to the device.

        Such as those of a parameter that was replaced by a smaller one.
        """
        swapping = {candidate.name for candidate in candidates}
        moved = [
            (unit.param, key, wrap_like(current, local_of(current).to(device), state_exists=True))
            for unit in units
            if (device := local_of(unit.param).device).type not in ("cpu", "meta")
            for key, current in self.selection.states_of(unit, state)
            if current is not None and local_of(current).device.type == "cpu"
            if (unit.param, key) not in swapping
            if (known := self.swapped(unit.param).get(key)) is None or current is not known.shown
        ]
        for param, key, value in moved:
            state[param][key] = value

    # Giving them one.

    def _homes(self, candidates: list[Candidate]) -> Homes:
        """Host memory for each candidate: where its values are, where they were, or new."""
        by_shown = self.homes.by_shown()
        homes: Homes = {}
        lacking: list[Candidate] = []
        for candidate in candidates:
            # A state that is shown already, of another parameter or key: values move with it,
            # unless a state dict looks at them, which must not see updates.
            home = by_shown.get(id(candidate.like)) if candidate.exists else None
            if home is None or home.has_snapshot:
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
            like = self.selection.template(unit, key)
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
        units = list(self.selection.listed())
        shared, names = self.selection.shared_storages(state), names_of(self._adapter.optimizer)
        return [
            self._state_report(unit, names[unit.param], key, current, shared)
            for unit in units
            for key, current in self.selection.states_of(unit, state)
        ]

    def _state_report(
        self,
        unit: TorchUnit,
        owner: str,
        key: str,
        current: torch.Tensor | None,
        shared: set[int],
    ) -> StateReport:
        like = self.selection.template(unit, key) if current is None else current
        known = self.swapped(unit.param).get(key)
        swaps = known is not None and current is known.shown
        exists = current is not None
        reason = self.selection.stay_reason(unit, key, like, exists=exists, shared=shared)
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
