# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer: which of them swap, and the host memory of those.

``optimizer.state[param][key]`` is the host tensor itself between updates, so whatever reads,
saves, copies or edits it there works on the current values. What is on the device during an update
is private to the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final
from weakref import ref

import torch

from swap_core import Ledger, StateReport, StayReason, SwapInternalError, SwapSlot, UpdateUnit
from swap_torch.adapter import TorchSwapAdapter, TorchUnit, owner_name
from swap_torch.counters import CounterTable
from swap_torch.device import AnyTorchDevice
from swap_torch.eligibility import Eligibility
from swap_torch.host import HostPool, own_storage_view
from swap_torch.sharding import local_of, wrap_like

__all__ = ["OptimizerState", "StateTable", "SwappedState"]

OptimizerState: TypeAlias = dict[torch.Tensor, Any]
"""``optimizer.state``: a defaultdict from parameter to a dict of its states."""


@final
class SwappedState:
    """One state with host memory. Lives as long as its parameter is in the optimizer.

    What ``optimizer.state`` shows is an alias of ``host``, made by :meth:`show` and referred to
    weakly: so it can be told whether anybody still holds the values.

    Args:
        slot: Its identity.
        device: The device that loads and stores it.
        host: The values, on the CPU, in the state's own shape and strides, with a storage of
            their own.
    """

    def __init__(self, slot: SwapSlot, device: AnyTorchDevice, host: torch.Tensor) -> None:
        self.slot = slot
        self.device = device
        self.host = host
        self._shown: Callable[[], torch.Tensor | None] = _nothing

    @property
    def shown(self) -> torch.Tensor | None:
        """What ``optimizer.state`` shows of it; None once nobody has that any more."""
        return self._shown()

    @property
    def is_held(self) -> bool:
        """Whether anybody has a tensor over the values: the optimizer's state, or a user."""
        # Two: ``host``, and the storage object that the question makes. torch's CUDA graphs ask
        # the same way.
        return torch._C._storage_Use_Count(self.host.untyped_storage()._cdata) > 2

    def show(self, like: torch.Tensor, *, state_exists: bool) -> torch.Tensor:
        """Make what ``optimizer.state`` is to show: the host tensor, or a DTensor around it."""
        shown = wrap_like(like, self.host.detach(), state_exists=state_exists)
        self._shown = ref(shown)
        return shown

    def fits(self, like: torch.Tensor, stride: tuple[int, ...], device: AnyTorchDevice) -> bool:
        """Tell whether values like the local tensor ``like`` can live here."""
        return (
            self.host.dtype == like.dtype
            and self.host.shape == like.shape
            and self.host.stride() == stride
            and self.device is device
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A state that swaps and is not in its slot: about to be born, or brought in from outside."""

    unit: TorchUnit
    key: str
    like: torch.Tensor
    """The state itself, or what it will be like; in its wrapper."""
    exists: bool
    device: AnyTorchDevice

    @property
    def stride(self) -> tuple[int, ...]:
        local = local_of(self.like)
        # A new state is zeros_like(template): dense, dimensions in the template's order.
        return local.stride() if self.exists else torch.empty_like(local, device="meta").stride()

    @property
    def nbytes(self) -> int:
        return _nbytes(local_of(self.like))


_Homes: TypeAlias = dict[tuple[torch.Tensor, str], SwappedState]


@final
class StateTable:
    """Finds, makes and adopts states; owns the host memory of those that swap.

    Args:
        adapter: Knows the optimizer's states.
        eligibility: Decides which of them swap.
        ledger: Where host memory and views are counted.
    """

    def __init__(self, adapter: TorchSwapAdapter, eligibility: Eligibility, ledger: Ledger) -> None:
        self._adapter = adapter
        self._eligibility = eligibility
        self._ledger = ledger
        self._pools: dict[torch.device, HostPool] = {}
        self._swapped: dict[torch.Tensor, dict[str, SwappedState]] = {}
        self.counters = CounterTable()
        self._orphans: list[SwappedState] = []
        """States of parameters that left, until the next ``admit``."""

    def swapped(self, param: torch.Tensor) -> Mapping[str, SwappedState]:
        """The states of ``param`` that swap and exist, in the order of the optimizer's keys."""
        return self._swapped.get(param, {})

    def pool(self, device: AnyTorchDevice) -> HostPool:
        """The host memory of states that swap on ``device``."""
        return self._pools[device.torch_device]

    @property
    def pinned(self) -> bool:
        """Whether all host memory is pinned."""
        return all(pool.pinned for pool in self._pools.values())

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
        for unit in units:
            if not state.get(unit.param):
                group = self._adapter.optimizer.param_groups[unit.adapter_index]
                self._adapter.check_newborn(unit.param, group)
        candidates = list(self._candidates(units, state))
        homes = self._homes(candidates)
        for candidate in candidates:
            home = homes[candidate.unit.param, candidate.key]
            if candidate.exists and candidate.like is not home.shown:
                home.host.copy_(local_of(candidate.like))
                shown = home.show(candidate.like, state_exists=True)
                state[candidate.unit.param][candidate.key] = shown
        for unit in units:
            if not state.get(unit.param):
                state[unit.param].update(self._newborn(unit, homes))
        for (param, key), home in homes.items():
            self._swapped.setdefault(param, {})[key] = home
        self._gather_counters(units, state)
        self._orphans.clear()
        if homes:
            self._free_segments()

    def adopt(self, state: OptimizerState) -> None:
        """Move states that exist, of whatever parameter, to where they belong."""
        self.admit([unit for unit in self._all_units() if state.get(unit.param)], state)

    def part_with_all_but(self, params: Iterable[torch.Tensor]) -> None:
        """Drop what is known of parameters that left the optimizer.

        Trainers replace parameters by others and hand them the old ones' states: the next ``admit``
        takes such states with the host memory that they have, and frees what nobody took.
        """
        stay = set(params)
        for param in [param for param in self._swapped if param not in stay]:
            self._orphans += self._swapped.pop(param).values()

    def _gather_counters(self, units: Iterable[TorchUnit], state: OptimizerState) -> None:
        keys = self._adapter.counter_keys()
        if self.counters.gather([state[unit.param] for unit in units], keys):
            every = [state[unit.param] for unit in self._all_units() if state.get(unit.param)]
            self.counters.keep_only(every, keys)

    def _free_segments(self) -> None:
        homes = [state for states in self._swapped.values() for state in states.values()]
        for torch_device, pool in self._pools.items():
            pool.keep_only(
                {h.slot.span.segment for h in homes if h.device.torch_device == torch_device}
            )

    def stay_reason(self, unit: TorchUnit, key: str) -> StayReason | None:
        """Why a state that does not exist yet would stay on the device."""
        return self._reason(unit, key, self._adapter.template(unit.param), exists=False)

    # Which states need a home.

    def _candidates(self, units: list[TorchUnit], state: OptimizerState) -> Iterator[_Candidate]:
        shared = self._shared_storages(state)
        for unit in units:
            for key, current in self._states_of(unit, state):
                known = self.swapped(unit.param).get(key)
                if known is not None and current is known.shown:
                    continue
                exists = current is not None
                like = self._adapter.template(unit.param) if current is None else current
                if self._reason(unit, key, like, exists=exists, shared=shared) is None:
                    device = self._eligibility.device_of(local_of(unit.param))
                    if device is None:
                        raise SwapInternalError(f"state {key} swaps without a device")
                    yield _Candidate(unit, key, like, exists, device)
                elif known is not None:
                    del self._swapped[unit.param][key]

    def _states_of(
        self, unit: TorchUnit, state: OptimizerState
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each tensor state that is there, or will be born now (None)."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        entry = state.get(unit.param)
        for key in self._adapter.state_keys(group):
            if not entry:
                yield key, None
            elif isinstance(entry.get(key), torch.Tensor):
                yield key, entry[key]

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
        if reason is None and exists and _storage_pointer(local) in shared:
            return StayReason.SHARES_STORAGE
        return reason

    def _shared_storages(self, state: OptimizerState) -> set[int]:
        """Storages that two states of the optimizer have in common."""
        counts = Counter(
            _storage_pointer(local_of(current))
            for unit in {unit.param: unit for unit in self._all_units()}.values()
            for _, current in self._states_of(unit, state)
            if current is not None and local_of(current).layout is torch.strided
        )
        return {pointer for pointer, count in counts.items() if count > 1 and pointer != 0}

    def _all_units(self) -> Iterator[TorchUnit]:
        for group_index, group in enumerate(self._adapter.optimizer.param_groups):
            for param in group["params"]:
                yield UpdateUnit(param, group_index, 0, ())

    # Giving them one.

    def _homes(self, candidates: list[_Candidate]) -> _Homes:
        """Host memory for each candidate: where its values are, where they were, or new."""
        by_shown = {id(home.shown): home for home in self._all_homes()}
        homes: _Homes = {}
        lacking: dict[torch.device, dict[torch.Tensor, list[_Candidate]]] = {}
        for candidate in candidates:
            param = candidate.unit.param
            # A state that is shown already, of another parameter or key: values move with it.
            home = by_shown.get(id(candidate.like)) if candidate.exists else None
            if home is None:
                home = self._reusable(self.swapped(param).get(candidate.key))
            like = local_of(candidate.like)
            if home is not None and home.fits(like, candidate.stride, candidate.device):
                homes[param, candidate.key] = home
            else:
                device = candidate.device.torch_device
                lacking.setdefault(device, {}).setdefault(param, []).append(candidate)
        for by_param in lacking.values():
            homes.update(self._new_homes(list(by_param.values())))
        return homes

    def _all_homes(self) -> Iterator[SwappedState]:
        for states in self._swapped.values():
            yield from states.values()
        yield from self._orphans

    @staticmethod
    def _reusable(home: SwappedState | None) -> SwappedState | None:
        """``home``, unless somebody still has its values: they would change under their eyes."""
        return None if home is None or home.is_held else home

    def _new_homes(self, units: list[list[_Candidate]]) -> _Homes:
        """Host memory in one go for parameters of one device."""
        device = units[0][0].device
        pool = self._pools.setdefault(device.torch_device, HostPool(device, self._ledger))
        spans = pool.reserve([[c.nbytes for c in candidates] for candidates in units])
        names = self._names()
        homes: _Homes = {}
        for candidates, placed in zip(units, spans, strict=True):
            for candidate, span in zip(candidates, placed, strict=True):
                local = local_of(candidate.like)
                raw = pool.bytes_at(span)[: candidate.nbytes]
                host = own_storage_view(raw, local.dtype, local.shape, candidate.stride)
                slot = SwapSlot(
                    owner=names[candidate.unit.param],
                    key=candidate.key,
                    shape=tuple(local.shape),
                    dtype=_dtype_name(local.dtype),
                    nbytes=candidate.nbytes,
                    span=span,
                )
                homes[candidate.unit.param, candidate.key] = SwappedState(slot, device, host)
        return homes

    def _newborn(self, unit: TorchUnit, homes: _Homes) -> dict[str, Any]:
        """All states of a parameter that is updated for the first time, zeros, in native order."""
        group = self._adapter.optimizer.param_groups[unit.adapter_index]
        like = self._adapter.template(unit.param)
        entry = self._adapter.new_counters(unit.param, group)
        for key in self._adapter.state_keys(group):
            home = homes.get((unit.param, key))
            if home is None:
                entry[key] = torch.zeros_like(like, memory_format=torch.preserve_format)
            else:
                # The memory may be that of an earlier life, if the user emptied the state.
                home.host.zero_()
                entry[key] = home.show(like, state_exists=False)
        return entry

    # Telling.

    def report(self, state: OptimizerState) -> list[StateReport]:
        """Describe every state of every parameter of the optimizer."""
        units = list(self._all_units())
        shared, names = self._shared_storages(state), self._names()
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
        like = self._adapter.template(unit.param) if current is None else current
        known = self.swapped(unit.param).get(key)
        swaps = known is not None and current is known.shown
        reason = self._reason(unit, key, like, exists=current is not None, shared=shared)
        local = local_of(like)
        return StateReport(
            owner=owner,
            key=key,
            shape=tuple(local.shape),
            dtype=_dtype_name(local.dtype),
            nbytes=_nbytes(local),
            stays=None if swaps else reason,
            born=current is not None,
        )

    def _names(self) -> dict[torch.Tensor, str]:
        optimizer = self._adapter.optimizer
        return {
            param: owner_name(optimizer, group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }


def _nothing() -> None:
    """What a reference to no tensor gives."""


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage_pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
