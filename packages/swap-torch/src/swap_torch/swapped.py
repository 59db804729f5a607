# SPDX-License-Identifier: Apache-2.0
"""One state with host memory, and who looks at that memory.

Three kinds of tensor alias it: ``host`` is the engine's own; ``optimizer.state`` shows another; and
state dicts hold snapshots. The first two follow the training. A snapshot must not, so memory that
one still looks at is never written again: see ``Snapshots.leave``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final
from weakref import ref

import torch

from swap_core import SwapSlot
from swap_torch.device import AnyTorchDevice
from swap_torch.forms import Form, memories_of
from swap_torch.host import own_storage_view
from swap_torch.sharding import local_of, wrap_like

__all__ = ["SwappedState"]


@final
class SwappedState:
    """One state with host memory. Lives as long as its parameter is in the optimizer.

    What ``optimizer.state`` shows is an alias of ``host``, made by :meth:`show` and referred to
    weakly: so it can be told whether anybody still holds the values.

    Args:
        slot: Its identity.
        device: The device that loads and stores it.
        raw: Its bytes in a host segment, 1-D uint8.
        form: How its values lie in them.
    """

    def __init__(
        self,
        slot: SwapSlot,
        device: AnyTorchDevice,
        raw: torch.Tensor,
        form: Form,
    ) -> None:
        self.slot = slot
        self.device = device
        self.form = form
        self._raw = raw
        self.memories = self._views()
        """The values, on the CPU, each tensor with a storage of its own."""
        self.host = form.over(self.memories)
        """The local state over them: mostly the only one of them."""
        self._shown: Callable[[], torch.Tensor | None] = _nothing
        self._shows = _Aliases()
        self._snapshots = _Aliases()

    @property
    def shown(self) -> torch.Tensor | None:
        """What ``optimizer.state`` shows of it; None once nobody has that any more."""
        return self._shown()

    @property
    def is_held(self) -> bool:
        """Whether anybody has the values: the optimizer's state, a user, or a state dict."""
        return self._shows.alive or self.has_snapshot

    @property
    def has_snapshot(self) -> bool:
        """Whether a state dict, or anything made from one, looks at the values."""
        return self._snapshots.alive

    def show(self, like: torch.Tensor, *, state_exists: bool) -> torch.Tensor:
        """Make what ``optimizer.state`` is to show: a host tensor, or a DTensor around it."""
        shown = wrap_like(like, self._alias(self._shows), state_exists=state_exists)
        self._shown = ref(shown)
        return shown

    def snapshot(self, shown: torch.Tensor) -> torch.Tensor:
        """Make what a state dict is to show, without copying; wrapped like ``shown``."""
        return wrap_like(shown, self._alias(self._snapshots), state_exists=True)

    def is_here(self, shown: torch.Tensor) -> bool:
        """Tell whether ``shown`` still looks at the values.

        It does not after ``shown.data = other``, or ``shown.share_memory_()``, which passing it to
        another process does.
        """
        found = [memory.data_ptr() for memory in memories_of(local_of(shown))]
        return found == [memory.data_ptr() for memory in self.memories]

    def _views(self) -> list[torch.Tensor]:
        return [
            own_storage_view(self._raw[memory.bytes], memory.dtype, memory.shape, memory.stride)
            for memory in self.form.memories
        ]

    def _alias(self, group: _Aliases) -> torch.Tensor:
        """A local state over the values, with storages of its own."""
        aliases = self._views()
        for alias in aliases:
            group.add(alias)
        return self.form.over(aliases)

    def fits(self, form: Form, device: AnyTorchDevice) -> bool:
        """Tell whether values of ``form`` that swap on ``device`` can live here."""
        return self.device is device and self.form == form


class _Aliases:
    """Storages over the same memory; known by weak references, so that they die unhindered.

    A storage lives as long as anything that uses it, in Python or not: tensors, views, arrays.
    """

    def __init__(self) -> None:
        self._storages: list[ref[torch.UntypedStorage]] = []

    @property
    def alive(self) -> bool:
        return any(storage() is not None for storage in self._storages)

    def add(self, tensor: torch.Tensor) -> None:
        self._storages = [storage for storage in self._storages if storage() is not None]
        self._storages.append(ref(tensor.untyped_storage()))


def _nothing() -> None:
    """What a reference to no tensor gives."""
