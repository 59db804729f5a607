# SPDX-License-Identifier: Apache-2.0
"""What the simulated accelerator can be told, and what its checker tells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["NPU_QUIRKS", "Link", "Quirks", "Race", "Schedule"]


class Schedule(Enum):
    """When queued work runs. Each is one of the orders that streams, events and waits allow."""

    THREADS = 0
    """A thread for each stream: real concurrency, and the only schedule with a link model."""
    EARLIEST = 1
    """Everything at once."""
    LATEST = 2
    """Everything as late as possible: when the host, or what the host waits for, waits for it."""
    SIDE_STREAMS_FIRST = 3
    """Default streams as late as possible, all others at once."""
    RANDOM = 4
    """In an order that a seed draws from those that are legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A model of the link between host and devices, for :attr:`Schedule.THREADS`.

    Attributes:
        to_device: Bytes per second; None: no limit. One transfer at a time in each direction.
        to_host: The same in the other direction.
        latency: Seconds before each transfer.
    """

    to_device: float | None = None
    to_host: float | None = None
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """What Ascend NPUs with torch_npu do differently, as far as it can be imitated.

    Attributes:
        memory_rounding: Device memory is rounded to (size + 32) up to a multiple of 512, not size.
        pinned_power_of_two: Pinned memory is rounded up to a power of two.
        resize_checks: ``storage.resize_`` refuses storages that :func:`mark_private_format`
            marked, and sizes that are no multiple of the item size; the latter only after the
            contents are gone.
        fused_ignores_scaler: fused AdamW ignores ``grad_scale`` and ``found_inf``.
    """

    memory_rounding: bool = False
    pinned_power_of_two: bool = False
    resize_checks: bool = False
    fused_ignores_scaler: bool = False


NPU_QUIRKS = Quirks(
    memory_rounding=True,
    pinned_power_of_two=True,
    resize_checks=True,
    fused_ignores_scaler=True,
)
"""All of them."""


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of the same bytes that nothing orders, at least one of which writes.

    Attributes:
        operation: What was queued later.
        where: On which stream; or the host.
        access: ``reads``, ``writes`` or ``frees``.
        memory: Which block, and its bytes.
        bytes: Which bytes of it, ``begin:end``, the earlier access touches.
        earlier: What was queued earlier.
        earlier_where: On which stream.
        earlier_access: ``reads`` or ``writes``.
        missing: The wait that is not there.
    """

    operation: str
    where: str
    access: str
    memory: str
    bytes: str
    earlier: str
    earlier_where: str
    earlier_access: str
    missing: str

    def __str__(self) -> str:
        """Tell it in one line."""
        return (
            f"{self.operation} on {self.where} {self.access} {self.memory}, bytes {self.bytes}, "
            f"which {self.earlier} on {self.earlier_where} {self.earlier_access}: {self.missing}"
        )
