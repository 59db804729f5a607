# SPDX-License-Identifier: Apache-2.0
"""The host memory of one optimizer: a home for each state that swaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from swap_core import Ledger, SwapSlot
from swap_torch.adapter import TorchSwapAdapter, TorchUnit, owner_name
from swap_torch.device import AnyTorchDevice
from swap_torch.forms import Form
from swap_torch.host import HostPool
from swap_torch.sharding import local_of
from swap_torch.swapped import SwappedState

__all__ = ["Candidate", "HomeTable", "Homes", "dtype_name", "names_of"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state that swaps and is not in its slot: about to be born, or brought in from outside."""

    unit: TorchUnit
    key: str
    like: torch.Tensor
    """The state itself, or what it will be like; in its wrapper."""
    exists: bool
    device: AnyTorchDevice

    @property
    def name(self) -> tuple[torch.Tensor, str]:
        """Parameter and key."""
        return self.unit.param, self.key

    @property
    def form(self) -> Form:
        """How its values will lie on the host."""
        return Form(local_of(self.like))


Homes: TypeAlias = dict[tuple[torch.Tensor, str], SwappedState]
"""By parameter and key."""


@final
class HomeTable:
    """Homes by parameter and key, and the pools of host memory under them.

    Args:
        adapter: Knows the optimizer's parameters.
        ledger: Where host memory and views are counted.
    """

    def __init__(self, adapter: TorchSwapAdapter, ledger: Ledger) -> None:
        self._adapter = adapter
        self._ledger = ledger
        self._pools: dict[torch.device, HostPool] = {}
        self._by_param: dict[torch.Tensor, dict[str, SwappedState]] = {}
        self._orphans: list[SwappedState] = []
        """Of parameters that left, until the next ``settle``."""
        self._emptied = False
        """Whether homes were moved out of since then."""

    def of(self, param: torch.Tensor) -> Mapping[str, SwappedState]:
        """The homes of a parameter's states, in the order of the optimizer's keys."""
        return self._by_param.get(param, {})

    def pool(self, device: AnyTorchDevice) -> HostPool:
        """The host memory of states that swap on ``device``."""
        return self._pools[device.torch_device]

    @property
    def pinned(self) -> bool:
        """Whether all host memory is pinned."""
        return all(pool.pinned for pool in self._pools.values())

    def by_shown(self) -> dict[int, SwappedState]:
        """Homes by the identity of what ``optimizer.state`` shows of each."""
        shown = ((home.shown, home) for home in self._all())
        return {id(tensor): home for tensor, home in shown if tensor is not None}

    def allocate(self, candidates: Iterable[Candidate]) -> Homes:
        """Make new homes, with memory that is allocated in one go for each device."""
        lanes: dict[torch.device, dict[torch.Tensor, list[Candidate]]] = {}
        for candidate in candidates:
            lane = lanes.setdefault(candidate.device.torch_device, {})
            lane.setdefault(candidate.unit.param, []).append(candidate)
        homes: Homes = {}
        for lane in lanes.values():
            homes |= self._allocate_on_device(list(lane.values()))
        return homes

    def settle(self, homes: Homes, *, only: bool = False) -> None:
        """Let states live in these homes, and free memory that nobody lives in any more.

        Args:
            homes: New and old ones.
            only: Whether no other home stays.
        """
        if only:
            self._by_param.clear()
        self._part_with_moved(homes)
        for (param, key), home in homes.items():
            self._by_param.setdefault(param, {})[key] = home
        self._orphans.clear()
        if homes or only or self._emptied:
            self._free_segments()
            self._emptied = False

    def _part_with_moved(self, homes: Homes) -> None:
        """Let no parameter keep a home that another one lives in now."""
        owners = {id(home): name for name, home in homes.items()}
        for param, states in self._by_param.items():
            for key, home in list(states.items()):
                owner, as_key = owners.get(id(home), (param, key))
                if owner is not param or as_key != key:
                    del states[key]

    def move_out(self, param: torch.Tensor, key: str) -> None:
        """Forget a home; its memory is free after the next :meth:`settle`."""
        del self._by_param[param][key]
        self._emptied = True

    def part_with_all_but(self, params: Iterable[torch.Tensor]) -> None:
        """Drop the homes of parameters that left the optimizer, at the next :meth:`settle`."""
        stay = set(params)
        for param in [param for param in self._by_param if param not in stay]:
            self._orphans += self._by_param.pop(param).values()

    def _all(self) -> Iterator[SwappedState]:
        for states in self._by_param.values():
            yield from states.values()
        yield from self._orphans

    def _free_segments(self) -> None:
        homes = list(self._all())
        for torch_device, pool in self._pools.items():
            pool.keep_only(
                {h.slot.span.segment for h in homes if h.device.torch_device == torch_device}
            )

    def _allocate_on_device(self, units: list[list[Candidate]]) -> Homes:
        device = units[0][0].device
        pool = self._pools.setdefault(device.torch_device, HostPool(device, self._ledger))
        forms = [[candidate.form for candidate in candidates] for candidates in units]
        spans = pool.reserve([[form.nbytes for form in each] for each in forms])
        names = names_of(self._adapter.optimizer)
        homes: Homes = {}
        for candidates, shapes, placed in zip(units, forms, spans, strict=True):
            for candidate, form, span in zip(candidates, shapes, placed, strict=True):
                local = local_of(candidate.like)
                slot = SwapSlot(
                    owner=names[candidate.unit.param],
                    key=candidate.key,
                    shape=tuple(local.shape),
                    dtype=dtype_name(local.dtype),
                    nbytes=form.nbytes,
                    span=span,
                )
                raw = pool.bytes_at(span)[: form.nbytes]
                homes[candidate.name] = SwappedState(slot, device, raw, form)
        return homes


def names_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Each parameter's name in the words of messages."""
    return {
        param: owner_name(optimizer, group_index, index)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
    }


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` and the like."""
    return str(dtype).removeprefix("torch.")
