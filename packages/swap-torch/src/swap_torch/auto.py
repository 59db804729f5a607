# SPDX-License-Identifier: Apache-2.0
"""``offload="auto"``: swap first, then see how much of it was necessary."""

from __future__ import annotations

from typing import final

from swap_core import format_bytes
from swap_torch.device import AnyTorchDevice

__all__ = ["AutoOffload"]

_UPDATES_SEEN = 3
"""The first makes the states, the second has plans; the third follows a whole, usual iteration."""
_MARGIN = 0.1
"""Of all device memory: for what later iterations need more, such as longer sequences."""


@final
class AutoOffload:
    """Decides once how many bytes of states may stay on the device.

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

    def decide(self, device: AnyTorchDevice, state_bytes: int) -> int:
        """Tell how many bytes of states may stay.

        Args:
            device: Where the states swap.
            state_bytes: Bytes of all states that swap.
        """
        free, total = device.memory_info()
        margin = int(total * _MARGIN)
        budget = max(0, free - margin)
        kept = "all of them stay" if budget >= state_bytes else "as many as fit there stay"
        self.decision = (
            f"offload='auto': after {_UPDATES_SEEN} updates {format_bytes(free)} of "
            f"{format_bytes(total)} device memory had never been taken. All but a margin of "
            f"{format_bytes(margin)} is for states ({format_bytes(state_bytes)}): "
            f"{kept if budget else 'all of them swap'}."
        )
        return budget
