# SPDX-License-Identifier: Apache-2.0
"""``offload="auto"``: swap first, then see how much of it was necessary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import final

import torch

from swap_core import format_bytes
from swap_torch.budget import first_that_fit
from swap_torch.device import AnyTorchDevice
from swap_torch.sharding import local_of

__all__ = ["AutoOffload"]

_UPDATES_SEEN = 3
"""The first makes the states, the second has plans; the third follows a whole, usual iteration."""
_MARGIN = 0.1
"""Of all device memory: for what later iterations need more, such as longer sequences."""


@final
class AutoOffload:
    """Decides once which states may stay on the device.

    What the allocator never took from the device in whole iterations, with states swapped, is
    free for states. A tenth of the memory is left alone.
    """

    def __init__(self) -> None:
        self._updates = 0
        self.decision = ""
        """What was decided, and why, in words; empty before."""

    def update_done(self) -> bool:
        """Count an update; tell whether it is time to decide, which it is once."""
        self._updates += 1
        return self._updates == _UPDATES_SEEN

    def decide(
        self, devices: Iterable[AnyTorchDevice], sizes: Mapping[torch.Tensor, int]
    ) -> set[torch.Tensor]:
        """Tell of which parameters the states may stay.

        Args:
            devices: Where states swap.
            sizes: For each parameter, in order, the bytes of its states that could swap.
        """
        stay: set[torch.Tensor] = set()
        told: list[str] = []
        for device in devices:
            own = {p: n for p, n in sizes.items() if local_of(p).device == device.torch_device}
            free, total = device.memory_info()
            margin = int(total * _MARGIN)
            fit = first_that_fit(own, max(0, free - margin))
            stay |= fit
            told.append(_told(device, free, total, margin, own, fit))
        self.decision = f"offload='auto': after {_UPDATES_SEEN} updates {' '.join(told)}"
        return stay

    def found_no_room(self) -> None:
        """What was decided could not be done."""
        self.decision += (
            " But there was no room for them in one piece (other programs, or fragmented memory): "
            "all of them swap."
        )


def _told(
    device: AnyTorchDevice,
    free: int,
    total: int,
    margin: int,
    sizes: Mapping[torch.Tensor, int],
    stay: Set[torch.Tensor],
) -> str:
    bytes_of_all, kept = sum(sizes.values()), sum(sizes[param] for param in stay)
    how_many = "all" if kept == bytes_of_all else format_bytes(kept)
    result = f"{how_many} of them stay" if kept else "all of them swap"
    return (
        f"{format_bytes(free)} of {format_bytes(total)} device memory had never been taken on "
        f"{device.torch_device}. All but a margin of {format_bytes(margin)} is for states "
        f"({format_bytes(bytes_of_all)}): {result}."
    )
