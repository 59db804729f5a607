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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from mindspore import Parameter, Tensor

from swap_core import Ledger, Span, StateReport, StayReason, SwapOptimizerConfig, SwapSlot
from swap_mindspore.adapter import MindSporeSwapAdapter
from swap_mindspore.device import AnyMindSporeDevice, DeviceMemory, empty_storages
from swap_mindspore.eligibility import Eligibility
from swap_mindspore.sharding import local_of

__all__ = ["StateTable", "StayingState", "SwappedState"]


@dataclass(frozen=True, slots=True)
class SwappedState:
    """A state that swaps. See [Note: what a state Parameter shows]."""

    slot: SwapSlot
    param: Parameter
    """The optimizer's own, bound to ``host``."""
    host: Tensor
    device: Parameter
    """Has 0 bytes of storage but while its batch is on the device."""

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


class _Candidate(NamedTuple):
    """A state that is to swap."""

    position: int
    """The place of its parameter in the optimizer."""
    owner: str
    key: str
    param: Parameter
    """The state."""


@final
class StateTable:
    """All states of an optimizer. Making one moves those that swap to the host.

    Args:
        adapter: Knows the states.
        config: Selects those that swap.
        device: What swaps; None: nothing does.
        ledger: Where host memory is counted.
    """

    def __init__(
        self,
        adapter: MindSporeSwapAdapter,
        config: SwapOptimizerConfig,
        device: AnyMindSporeDevice | None,
        ledger: Ledger,
    ) -> None:
        states = adapter.states()
        everything = [*adapter.parameters, *(state for each in states.values() for state in each)]
        rules = Eligibility(config, device, everything)
        self._staying: dict[int, list[StayingState]] = {}
        self._swapped: dict[int, list[SwappedState]] = {}
        self._keys = tuple(states)
        chosen = self._choose(adapter.parameters, states, rules)
        if device is not None:
            self._move_out(chosen, device, ledger)

    def swapped_of(self, index: int) -> Sequence[SwappedState]:
        """The states of one parameter that swap, in the order of the keys."""
        return self._swapped.get(index, ())

    def tensors_of(self, index: int) -> dict[str, Tensor]:
        """What an update of one parameter works on, by key, in the order of the keys."""
        tensors = {state.key: local_of(state.param) for state in self._staying.get(index, ())}
        tensors |= {state.slot.key: state.device for state in self.swapped_of(index)}
        return {key: tensors[key] for key in self._keys}

    def adopt(self) -> None:
        """Take over what was put in the place of host memory from outside.

        Raises:
            ValueError: it has another shape or dtype than the state. Nothing was taken over.
        """
        moved = [
            state
            for states in self._swapped.values()
            for state in states
            if state.shown.data_ptr() != state.host.data_ptr()
        ]
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
            yield from (reports[key] for key in self._keys)

    def _choose(
        self,
        params: Sequence[Parameter],
        states: Mapping[str, Sequence[Parameter]],
        rules: Eligibility,
    ) -> list[_Candidate]:
        """Note what stays, and give what swaps."""
        chosen = []
        for index, param in enumerate(params):
            owner = f"parameter {index} ({param.name})"
            for key, members in states.items():
                reason = rules.stay_reason(key, members[index])
                if reason is None:
                    chosen.append(_Candidate(index, owner, key, members[index]))
                else:
                    staying = StayingState(owner, key, members[index], reason)
                    self._staying.setdefault(index, []).append(staying)
        return chosen

    def _move_out(
        self, chosen: Sequence[_Candidate], device: AnyMindSporeDevice, ledger: Ledger
    ) -> None:
        # All host memory first: if it runs out, nothing has changed yet.
        shards = [local_of(candidate.param) for candidate in chosen]
        hosts = [device.allocate_host(shard.shape, shard.dtype) for shard in shards]
        for host, shard in zip(hosts, shards, strict=True):
            host.copy_(shard)
        del shards
        for number, (candidate, host) in enumerate(zip(chosen, hosts, strict=True)):
            # The device memory of before is free from here on, so there is room for its successor.
            candidate.param.set_data(host)
            state = _swapped_state(candidate, host, number, device)
            self._swapped.setdefault(candidate.position, []).append(state)
            ledger.host_allocations += 1
            ledger.host_bytes += state.slot.nbytes


def _swapped_state(
    candidate: _Candidate, host: Tensor, number: int, device: AnyMindSporeDevice
) -> SwappedState:
    slot = SwapSlot(
        owner=candidate.owner,
        key=candidate.key,
        shape=tuple(host.shape),
        dtype=str(host.dtype).lower(),
        nbytes=host.nbytes,
        span=Span(number, 0, host.nbytes),
    )
    # A Parameter: in place of another Tensor, a kernel may update a converted copy.
    tensor = Parameter(device.allocate_device(host.shape, host.dtype), candidate.param.name)
    empty_storages(DeviceMemory((tensor,), (host.nbytes,)))
    return SwappedState(slot, candidate.param, host, tensor)


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
