# SPDX-License-Identifier: Apache-2.0
"""Where states are: on the host for good, on the device while their batch is there.

Two ways, :class:`PerTensorHomes` here and :class:`swap_mindspore.packed_homes.PackedHomes`. Each
first allocates host memory, so that nothing has changed if there is none, and makes the device's
side afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

from mindspore import Parameter, Tensor

from swap_core import Ledger, PerTensorPipeline, Pipeline, Span, SwapSlot
from swap_mindspore.device import (
    AnyMindSporeDevice,
    DeviceMemory,
    Memory,
    Transfer,
    empty_storages,
)
from swap_mindspore.sharding import local_of

__all__ = ["AnyPipeline", "Candidate", "Home", "Homes", "PerTensorHomes", "Placed"]

AnyPipeline: TypeAlias = Pipeline[Any, Any, Memory, Transfer]


class Candidate(NamedTuple):
    """A state that is to swap."""

    position: int
    """The place of its parameter in the optimizer."""
    owner: str
    key: str
    param: Parameter
    """The state."""

    @property
    def local(self) -> Tensor:
        """What the state is bound to at present, if sharded this rank's part of it."""
        return local_of(self.param)


@dataclass(frozen=True, slots=True)
class Home:
    """The host memory of a state."""

    candidate: Candidate
    slot: SwapSlot
    host: Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """The device's side of a batch."""

    tensors: tuple[Parameter, ...]
    """One for each state, in order: what an update works on."""
    memory: Memory
    transfers: tuple[Transfer, ...]
    nbytes: int
    """What moves each way."""


class Homes(ABC):
    """One way to place states.

    Args:
        device: What allocates.
    """

    def __init__(self, device: AnyMindSporeDevice) -> None:
        self._device = device

    @abstractmethod
    def order(self, sizes: Sequence[int]) -> Sequence[int]:
        """The order in which to update batches of so many bytes, as positions."""

    @abstractmethod
    def nbytes_of(self, candidate: Candidate) -> int:
        """What a state adds to its batch."""

    @abstractmethod
    def allocate(self, groups: Sequence[Sequence[Candidate]], ledger: Ledger) -> list[list[Home]]:
        """Give each state host memory, with undefined contents; those of a group lie together.

        Raises:
            MemoryError: there is none. What was allocated is free again.
        """

    @abstractmethod
    def place(self, batches: Sequence[Sequence[Home]]) -> list[Placed]:
        """Make the device's side of each batch, of the groups that were allocated last."""

    @abstractmethod
    def pipeline(self, ledger: Ledger) -> tuple[AnyPipeline, int]:
        """Make the pipeline for the batches that were placed last, and tell its ring."""


@final
class PerTensorHomes(Homes):
    """Each state has host memory and a device storage of its own."""

    def order(self, sizes: Sequence[int]) -> Sequence[int]:
        """That of the parameters, which needs the least memory: that of two neighbours."""
        return range(len(sizes))

    def nbytes_of(self, candidate: Candidate) -> int:
        """Its own bytes."""
        return int(candidate.local.nbytes)

    def allocate(self, groups: Sequence[Sequence[Candidate]], ledger: Ledger) -> list[list[Home]]:
        """Allocate state by state."""
        homes = [[self._home(candidate) for candidate in group] for group in groups]
        ledger.host_allocations += sum(map(len, homes))
        ledger.host_bytes = sum(home.slot.nbytes for group in homes for home in group)
        return homes

    def place(self, batches: Sequence[Sequence[Home]]) -> list[Placed]:
        """Make a Parameter with no memory for each state."""
        return [self._placed(batch) for batch in batches]

    def pipeline(self, ledger: Ledger) -> tuple[AnyPipeline, int]:
        """Two adjacent batches at a time."""
        return PerTensorPipeline(self._device, ledger), 2

    def _home(self, candidate: Candidate) -> Home:
        local = candidate.local
        host = self._device.allocate_host(local.shape, local.dtype)
        return Home(candidate, slot_of(candidate, host, Span(0, 0, host.nbytes)), host)

    def _placed(self, batch: Sequence[Home]) -> Placed:
        tensors = tuple(map(self._device_tensor, batch))
        sizes = tuple(home.slot.nbytes for home in batch)
        transfers = tuple(
            Transfer(tensor, home.host) for tensor, home in zip(tensors, batch, strict=True)
        )
        return Placed(tensors, DeviceMemory(tensors, sizes), transfers, sum(sizes))

    def _device_tensor(self, home: Home) -> Parameter:
        # A Parameter: in place of another Tensor, a kernel may update a converted copy.
        tensor = Parameter(
            self._device.allocate_device(home.host.shape, home.host.dtype),
            home.candidate.param.name,
        )
        empty_storages(DeviceMemory((tensor,), (home.slot.nbytes,)))
        return tensor


def slot_of(candidate: Candidate, host: Tensor, span: Span) -> SwapSlot:
    """Describe a state that lives in ``host``."""
    return SwapSlot(
        owner=candidate.owner,
        key=candidate.key,
        shape=tuple(host.shape),
        dtype=str(host.dtype).lower(),
        nbytes=host.nbytes,
        span=span,
    )
