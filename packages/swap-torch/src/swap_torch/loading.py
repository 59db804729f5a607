# SPDX-License-Identifier: Apache-2.0
"""``load_state_dict``: checks before anything changes, then values from host to host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, final

import torch

from swap_torch.forms import copy_values, hollow
from swap_torch.homes import Candidate, Homes
from swap_torch.loaded import LoadedState, each_value
from swap_torch.reading import LoadedEntries
from swap_torch.selection import OptimizerState
from swap_torch.sharding import local_of, wrap_like
from swap_torch.states import StateTable
from swap_torch.swapped import SwappedState

__all__ = ["Loader"]


class _Husk(NamedTuple):
    """A state that was let go of: enough to show it again."""

    home: SwappedState
    like: torch.Tensor


_PutAway = list[tuple[torch.Tensor, Any]]


@final
class Loader:
    """Puts loaded values where they belong.

    Args:
        table: The states.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table

    def load(self, entries: LoadedEntries, present: list[OptimizerState]) -> OptimizerState:
        """Make a new ``optimizer.state``; states that swap get host memory, others the device.

        Memory of present states is used again where nobody else looks at it. Memory is
        allocated before any value is overwritten, so that a failed allocation changes nothing.

        Args:
            entries: What to load, checked.
            present: The only reference to the present ``optimizer.state``, which is let go of. If
                this raises, it is there again.

        Returns:
            The new one. No tensor of it is one of ``entries``.
        """
        homes = self._table.homes
        kept = self._put_away(present.pop())
        try:
            found = self._homes(_states_in(entries))
            # Device memory of what stays; may run out too.
            made = [
                (param, {key: _made(value, found) for key, value in entry.items()})
                for param, entry in entries
            ]
        except BaseException:
            present.append(_restored(kept))
            raise
        del kept
        state: OptimizerState = defaultdict(dict)
        for param, entry in made:
            state[param] = {key: _shown(value, found) for key, value in entry.items()}
        homes.settle(found, only=True)
        return state

    def _homes(self, loaded: Iterable[LoadedState]) -> Homes:
        """Host memory for each state that swaps: where it is now, or new."""
        homes: Homes = {}
        lacking: list[Candidate] = []
        for each in loaded:
            candidate = self._table.candidate(each.unit, each.key, each.like)
            if candidate is None or not each.used:
                continue
            home = self._table.homes.of(each.unit.param).get(each.key)
            if home is not None and self._may_use(home, candidate, each.value):
                homes[each.name] = home
            else:
                lacking.append(candidate)
        return homes | self._table.homes.allocate(lacking)

    @staticmethod
    def _may_use(home: SwappedState, candidate: Candidate, source: torch.Tensor) -> bool:
        if not home.fits(candidate.form, candidate.device):
            return False
        # A state dict that this optimizer made since its latest update has the very memory.
        return not home.is_held or home.is_here(source)

    def _put_away(self, state: OptimizerState) -> _PutAway:
        """Keep what ``state`` has, except tensors over host memory.

        So that it is known whether others hold those.
        """
        by_shown = self._table.homes.by_shown()

        def husk(value: object) -> object:
            home = by_shown.get(id(value))
            if home is None or not isinstance(value, torch.Tensor):
                return value
            return _Husk(home, wrap_like(value, hollow(local_of(value)), state_exists=True))

        return [
            (param, {key: husk(value) for key, value in entry.items()})
            if isinstance(entry, dict)
            else (param, entry)
            for param, entry in state.items()
        ]


def _restored(kept: _PutAway) -> OptimizerState:
    """The state that was put away, over the same memory."""

    def shown(value: object) -> object:
        if isinstance(value, _Husk):
            return value.home.show(value.like, state_exists=True)
        return value

    state: OptimizerState = defaultdict(dict)
    for param, entry in kept:
        state[param] = (
            {key: shown(value) for key, value in entry.items()}
            if isinstance(entry, dict)
            else entry
        )
    return state


def _made(value: object, homes: Homes) -> object:
    """A copy of what does not go to host memory; what does is left for :func:`_shown`."""

    def found(value: object, _: str) -> object:
        if not isinstance(value, LoadedState) or (value.used and value.name in homes):
            return value
        return value.where_it_stays()

    return each_value(value, found)


def _shown(value: object, homes: Homes) -> object:
    """Copy what goes to host memory there; what ``optimizer.state`` shows of it."""
    if not isinstance(value, LoadedState):
        return value
    home = homes[value.name]
    if not home.is_here(value.value):
        copy_values(home.host, local_of(value.value))
    return home.show(value.value, state_exists=True)


def _states_in(entries: LoadedEntries) -> Iterator[LoadedState]:
    for _, entry in entries:
        yield from (value for value in entry.values() if isinstance(value, LoadedState))
