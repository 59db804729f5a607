# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer: which of them swap, and the host memory of those.

``optimizer.state[param][key]`` is the host tensor itself between updates, so whatever reads,
saves, copies or edits it there works on the current values. What is on the device during an update
is private to the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from swap_core import Ledger, StateReport, StayReason, SwapInternalError, SwapSlot, UpdateUnit
from swap_torch.adapter import TorchSwapAdapter, TorchUnit, owner_name
from swap_torch.device import AnyTorchDevice
from swap_torch.eligibility import Eligibility
from swap_torch.host import HostPool, own_storage_view
from swap_torch.sharding import local_of, wrap_like

__all__ = ["OptimizerState", "StateTable", "SwappedState"]

OptimizerState: TypeAlias = dict[torch.Tensor, Any]
"""``optimizer.state``: a defaultdict from parameter to a dict of its states."""


@dataclass(frozen=True, slots=True)
class SwappedState:
    """One state with host memory. Lives as long as its parameter is in the optimizer."""

    slot: SwapSlot
    device: AnyTorchDevice
    """The device that loads and stores it."""
    visible: torch.Tensor
    """What ``optimizer.state`` shows: ``host``, or a DTensor around it."""
    host: torch.Tensor
    """The values, on the CPU, in the state's own shape and strides."""

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
        candidates = list(self._candidates(units, state))
        homes = self._homes(candidates)
        for candidate in candidates:
            if candidate.exists:
                home = homes[candidate.unit.param, candidate.key]
                home.host.copy_(local_of(candidate.like))
                state[candidate.unit.param][candidate.key] = home.visible
        for unit in units:
            if not state.get(unit.param):
                state[unit.param].update(self._newborn(unit, homes))
        for (param, key), home in homes.items():
            self._swapped.setdefault(param, {})[key] = home

    def forget_all_but(self, params: Iterable[torch.Tensor]) -> None:
        """Drop what is known of parameters that left the optimizer."""
        keep = set(params)
        self._swapped = {p: states for p, states in self._swapped.items() if p in keep}

    def stay_reason(self, unit: TorchUnit, key: str) -> StayReason | None:
        """Why a state that does not exist yet would stay on the device."""
        return self._reason(unit, key, self._adapter.template(unit.param), exists=False)

    # Which states need a home.

    def _candidates(self, units: list[TorchUnit], state: OptimizerState) -> Iterator[_Candidate]:
        shared = self._shared_storages(units, state)
        for unit in units:
            for key, current in self._states_of(unit, state):
                known = self.swapped(unit.param).get(key)
                if known is not None and current is known.visible:
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

    def _shared_storages(self, units: list[TorchUnit], state: OptimizerState) -> set[int]:
        """Storages that two states have in common."""
        counts = Counter(
            _storage_pointer(local_of(current))
            for unit in units
            for _, current in self._states_of(unit, state)
            if current is not None and current.layout is torch.strided
        )
        return {pointer for pointer, count in counts.items() if count > 1 and pointer != 0}

    # Giving them one.

    def _homes(self, candidates: list[_Candidate]) -> _Homes:
        """Host memory for each candidate: where it was before, if that still fits, else new."""
        homes: _Homes = {}
        lacking: dict[torch.device, dict[torch.Tensor, list[_Candidate]]] = {}
        for candidate in candidates:
            param = candidate.unit.param
            known = self.swapped(param).get(candidate.key)
            like = local_of(candidate.like)
            if known is not None and known.fits(like, candidate.stride, candidate.device):
                homes[param, candidate.key] = known
            else:
                device = candidate.device.torch_device
                lacking.setdefault(device, {}).setdefault(param, []).append(candidate)
        for by_param in lacking.values():
            homes.update(self._new_homes(list(by_param.values())))
        return homes

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
                homes[candidate.unit.param, candidate.key] = SwappedState(
                    slot, device, wrap_like(candidate.like, host), host
                )
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
                entry[key] = home.visible
        return entry

    # Telling.

    def report(self, state: OptimizerState) -> list[StateReport]:
        """Describe every state of every parameter of the optimizer."""
        groups = self._adapter.optimizer.param_groups
        units = [
            UpdateUnit(param, group_index, 0, ())
            for group_index, group in enumerate(groups)
            for param in group["params"]
        ]
        shared, names = self._shared_storages(units, state), self._names()
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
        swaps = known is not None and current is known.visible
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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage_pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
