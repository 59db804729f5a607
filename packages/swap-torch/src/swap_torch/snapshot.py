# SPDX-License-Identifier: Apache-2.0
"""State dicts: what training had reached when they were taken, whatever it does afterwards.

[Note: what a state dict costs]
States that swap are shown as they are in host memory, without a copy. As long as a state dict, or
any tensor made from it, looks at that memory, no update writes it: the next update first moves the
states to other memory. So a state dict that is written to a file and dropped costs nothing; one
that an asynchronous saver still holds costs one copy of the states until it lets go, and so do
several of one step together. Copying at once would cost that in every case.

Counters and states that stay on the device are small; they are copied to the host at once, so that
a state dict is the same whatever the config says, and needs no device to be read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, final

import torch

from swap_torch.forms import copied_to, copy_values
from swap_torch.homes import Candidate, HomeTable
from swap_torch.selection import OptimizerState
from swap_torch.sharding import is_sharded, local_of, wrap_like
from swap_torch.states import StateTable

__all__ = ["Snapshots", "host_copies"]


@final
class Snapshots:
    """Makes state dicts, and keeps updates off the memory that they show.

    Args:
        table: The states.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table

    def take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace what a native state dict shows of the optimizer by what does not change.

        Args:
            state_dict: As native makes it; not changed. Stores are done.
        """
        homes = self._table.homes.by_shown()
        entries = {
            index: dict(entry) if isinstance(entry, dict) else copy.deepcopy(entry)
            for index, entry in state_dict["state"].items()
        }
        others: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for entry in filter(_is_dict, entries.values()):
            for key, value in entry.items():
                home = homes.get(id(value))
                if home is not None and home.is_here(value):
                    entry[key] = home.snapshot(value)
                elif isinstance(value, torch.Tensor):
                    others.append((entry, key, value))
                else:
                    entry[key] = copy.deepcopy(value)
        copies = host_copies([value for _, _, value in others])
        for (entry, key, _), copied in zip(others, copies, strict=True):
            entry[key] = copied
        groups = [
            {key: _own_option(value) for key, value in group.items()}
            for group in state_dict["param_groups"]
        ]
        return {**state_dict, "state": entries, "param_groups": groups}

    def leave(self, state: OptimizerState) -> None:
        """Move states to other host memory where a state dict still looks at theirs.

        To be called before an update writes host memory, when all stores are done. A failed
        allocation changes nothing.
        """
        homes = self._table.homes
        moving = list(self._still_looked_at(homes, state))
        moved = homes.allocate(moving)
        for candidate in moving:
            home = moved[candidate.name]
            copy_values(home.host, local_of(candidate.like))
            shown = home.show(candidate.like, state_exists=True)
            state[candidate.unit.param][candidate.key] = shown
        homes.settle(moved)

    def _still_looked_at(self, homes: HomeTable, state: OptimizerState) -> list[Candidate]:
        return [
            Candidate(unit, key, shown, exists=True, device=home.device)
            for unit in self._table.units()
            for key, home in homes.of(unit.param).items()
            if home.has_snapshot
            and (shown := home.shown) is not None
            and state.get(unit.param, {}).get(key) is shown
        ]


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host, each with a storage of its own, wrapped as before.

    Blocks until they are there. Counters on a device travel together: one by one, each would wait
    for the device.
    """
    copies: dict[int, torch.Tensor] = {}
    counters: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        local = local_of(tensor)
        if local.dim() == 0 and local.device.type != "cpu" and not is_sharded(tensor):
            counters.setdefault((local.device, local.dtype), []).append(position)
        else:
            copied = copied_to(local, torch.device("cpu"))
            copies[position] = wrap_like(tensor, copied, state_exists=True)
    for positions in counters.values():
        values = torch.stack([tensors[position].detach() for position in positions]).cpu()
        copies |= zip(positions, (value.clone() for value in values.unbind()), strict=True)
    return [copies[position] for position in range(len(tensors))]


def _own_option(value: object) -> object:
    """A group's option; tensors in it (lr, betas) are copied: schedulers write into them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(map(_own_option, value))
    return value


def _is_dict(entry: object) -> bool:
    return isinstance(entry, dict)
