# SPDX-License-Identifier: Apache-2.0
"""The states of one optimizer: which swap, and the host memory of those.

[Note: what a state Parameter shows]
From wrapping on, the Parameter of a state that swaps (``optimizer.moment1[0]``) is bound to host
memory and stays so, in updates too: the device tensor that a batch loads into is private to the
engine. So whatever reads the optimizer's Parameters (``save_checkpoint`` on it or on a Cell that
holds it, ``state_dict``, a callback, a user) sees real values, and nobody can see freed memory.

Whatever *replaces* a Parameter's data (``load_param_into_net``, ``load_state_dict``,
``set_data``) makes it point elsewhere, mostly at the caller's own tensor. That shows in its
address; :meth:`StateTable.adopt` then copies the values to the host memory and binds the Parameter
to it again. The caller's tensor is only read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from mindspore import Parameter, Tensor

from swap_core import Ledger, StateReport, StayReason, SwapOptimizerConfig, SwapSlot
from swap_mindspore.adapter import MindSporeSwapAdapter
from swap_mindspore.device import AnyMindSporeDevice
from swap_mindspore.eligibility import Eligibility
from swap_mindspore.homes import Candidate, Home, Homes, Placed
from swap_mindspore.sharding import local_of

__all__ = ["StateTable", "StayingState", "SwappedState"]


@dataclass(frozen=True, slots=True)
class SwappedState:
    """A state that swaps. See [Note: what a state Parameter shows]."""

    slot: SwapSlot
    param: Parameter
    """The optimizer's own, bound to ``host``."""
    host: Tensor
    device: Parameter | None
    """Has 0 bytes of storage but while its batch is on the device. None: no update moves it."""

    @property
    def shown(self) -> Tensor:
        """What ``param`` is bound to at present, if sharded by this rank's part of it."""
        return local_of(self.param)


@dataclass(frozen=True, slots=True)
class StayingState:
    """A state that stays on the device, and why."""

    owner: str
    key: str
    param: Parameter
    reason: StayReason


@final
class StateTable:
    """All states of an optimizer. Those that swap stay where they are until :meth:`place`.

    Args:
        adapter: Knows the states.
        config: Selects those that swap.
        device: What swaps; None: nothing does.
    """

    def __init__(
        self,
        adapter: MindSporeSwapAdapter,
        config: SwapOptimizerConfig,
        device: AnyMindSporeDevice | None,
    ) -> None:
        self._staying: dict[int, list[StayingState]] = {}
        self._candidates: dict[int, list[Candidate]] = {}
        self._swapped: dict[int, list[SwappedState]] = {}
        states = adapter.states()
        self._keys = tuple(states)
        existing = [state for each in states.values() for state in each if state is not None]
        rules = Eligibility(config, device, [*adapter.parameters, *existing])
        self._choose(adapter.parameters, states, rules)

    def candidates_of(self, index: int) -> Sequence[Candidate]:
        """The states of one parameter that swap, in the order of the keys."""
        return self._candidates.get(index, ())

    def place(self, batches: Sequence[Sequence[int]], homes: Homes, ledger: Ledger) -> list[Placed]:
        """Move every state that swaps to new host memory, for these batches of parameters.

        States of parameters that are in no batch are on the host too, but nothing moves them.

        Args:
            batches: Places of parameters, all with states that swap.
            homes: The way to place them.
            ledger: Where host memory is counted.

        Raises:
            MemoryError: no host memory. Nothing has changed.
        """
        moving = {index for batch in batches for index in batch}
        resting = [index for index in self._candidates if index not in moving]
        groups = [
            [candidate for index in group for candidate in self._candidates[index]]
            for group in (*batches, resting)
        ]
        homed = homes.allocate(groups, ledger)
        for home in (home for group in homed for home in group):
            home.host.copy_(home.candidate.local)
        for home in (home for group in homed for home in group):
            # The device memory of before is free from here on: there is room for the device's side.
            home.candidate.param.set_data(home.host)
        placed = homes.place(homed[: len(batches)]) if batches else []
        self._note(homed, placed)
        return placed

    def swapped_of(self, index: int) -> Sequence[SwappedState]:
        """The states of one parameter that swap, in the order of the keys."""
        return self._swapped.get(index, ())

    def tensors_of(self, index: int) -> dict[str, Tensor]:
        """What an update of one parameter works on, by key, in the order of the keys."""
        tensors = {state.key: local_of(state.param) for state in self._staying.get(index, ())}
        for state in self.swapped_of(index):
            assert state.device is not None  # asked only for parameters that are updated
            tensors[state.slot.key] = state.device
        return {key: tensors[key] for key in self._keys if key in tensors}

    def lend(self, keys: Collection[str], device: AnyMindSporeDevice) -> None:
        """Show states on the device until the next :meth:`adopt`, which takes them back."""
        for state in self._all():
            if state.slot.key in keys:
                tensor = device.allocate_device(state.host.shape, state.host.dtype)
                tensor.copy_(state.host)
                state.param.set_data(tensor)

    def adopt(self) -> None:
        """Take over what was put in the place of host memory from outside.

        Raises:
            ValueError: it has another shape or dtype than the state. Nothing was taken over.
        """
        moved = [state for state in self._all() if state.shown.data_ptr() != state.host.data_ptr()]
        for state in moved:
            _check_replacement(state)
        for state in moved:
            state.host.copy_(state.shown)
            state.param.set_data(state.host)

    def report(self) -> Iterator[StateReport]:
        """Describe every state, by parameter."""
        for index in sorted({*self._swapped, *self._staying}):
            reports = {s.slot.key: _report_swapped(s) for s in self.swapped_of(index)}
            reports |= {s.key: _report_staying(s) for s in self._staying.get(index, ())}
            yield from (reports[key] for key in self._keys if key in reports)

    def _all(self) -> Iterator[SwappedState]:
        for states in self._swapped.values():
            yield from states

    def _choose(
        self,
        params: Sequence[Parameter],
        states: Mapping[str, Sequence[Parameter | None]],
        rules: Eligibility,
    ) -> None:
        """Note what stays and what is to swap."""
        for index, param in enumerate(params):
            owner = f"parameter {index} ({param.name})"
            for key, members in states.items():
                state = members[index]
                if state is None:
                    continue
                reason = rules.stay_reason(key, state)
                if reason is None:
                    candidate = Candidate(index, owner, key, state)
                    self._candidates.setdefault(index, []).append(candidate)
                else:
                    staying = StayingState(owner, key, state, reason)
                    self._staying.setdefault(index, []).append(staying)

    def _note(self, homed: Sequence[Sequence[Home]], placed: Sequence[Placed]) -> None:
        """Remember where each state is."""
        self._swapped = {}
        for number, group in enumerate(homed):
            tensors = placed[number].tensors if number < len(placed) else [None] * len(group)
            for home, tensor in zip(group, tensors, strict=True):
                state = SwappedState(home.slot, home.candidate.param, home.host, tensor)
                self._swapped.setdefault(home.candidate.position, []).append(state)


def _check_replacement(state: SwappedState) -> None:
    found = (tuple(state.shown.shape), state.shown.dtype)
    if found != (state.slot.shape, state.host.dtype):
        raise ValueError(
            f"{state.slot.key} of {state.slot.owner} was replaced by a tensor of shape {found[0]} "
            f"and dtype {found[1]}; it must have shape {state.slot.shape} and dtype "
            f"{state.host.dtype}. Put a fitting tensor there."
        )


def _report_swapped(state: SwappedState) -> StateReport:
    slot = state.slot
    return StateReport(slot.owner, slot.key, slot.shape, slot.dtype, slot.nbytes, None, born=True)


def _report_staying(state: StayingState) -> StateReport:
    param = local_of(state.param)
    return StateReport(
        owner=state.owner,
        key=state.key,
        shape=tuple(param.shape),
        dtype=str(param.dtype).lower(),
        nbytes=param.nbytes,
        stays=state.reason,
        born=True,
    )
