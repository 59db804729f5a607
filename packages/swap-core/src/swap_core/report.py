# SPDX-License-Identifier: Apache-2.0
"""What swaps, what stays and why, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from swap_core.ledger import Ledger
from swap_core.timeline import StepTimes

__all__ = ["StateReport", "StayReason", "SwapReport", "format_bytes"]


class StayReason(Enum):
    """Why a state stays on the device. The value is the sentence that users see."""

    NOT_SELECTED = "it is not among the config's state_keys"
    NOT_FLOATING = "it is not a floating point tensor"
    NOT_DENSE = "its elements are not dense in memory (sparse, expanded or strided with gaps)"
    NOT_PLAIN = "it is a tensor subclass, whose memory is its own affair"
    ON_CPU = "its parameter is on the CPU, so there is no device memory to save"
    NOT_MATERIALISED = "its parameter is on the meta device and has no memory yet"
    BUDGET = "it fits within device_budget"
    TOO_SMALL = "it has fewer elements than min_numel"
    RELOADED = "it was brought to the device by reload(), until offload()"
    MASTER = "it is a master parameter, and include_master_params is False"
    SHARES_STORAGE = "it shares its storage with other tensors"


@dataclass(frozen=True, slots=True)
class StateReport:
    """One state of one parameter."""

    owner: str
    """The parameter: ``group 0, parameter 3 (name)``."""
    key: str
    """The state: ``exp_avg``."""
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stays: StayReason | None
    """None: it swaps."""
    born: bool
    """False: the parameter had no gradient yet, so the state has no memory anywhere."""


@dataclass(frozen=True, slots=True)
class SwapReport:
    """A snapshot of an optimizer's swapping. Bytes and seconds; nothing in it changes later."""

    optimizer: str
    packed: bool
    states: tuple[StateReport, ...]
    batches: int
    """Batches of the latest update that moved anything; 0 before it."""
    batch_bytes: tuple[int, ...]
    """Bytes that each of them moves in each direction."""
    pinned: bool
    """Whether all host memory is pinned. False costs speed: copies do not overlap."""
    ledger: Ledger
    """A copy of the counters."""
    decision: str = ""
    """What ``offload="auto"`` decided, and why; empty before, and without it."""
    last_step: StepTimes | None = None
    """Times of the latest update that moved anything, on the device's clock."""

    @property
    def swapped_bytes(self) -> int:
        """Bytes of the states that swap and exist."""
        return sum(s.nbytes for s in self.states if s.stays is None and s.born)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the states that exist and stay on the device."""
        return sum(s.nbytes for s in self.states if s.stays is not None and s.born)

    @property
    def master_bytes(self) -> tuple[int, int]:
        """Bytes of the fp32 master parameters that swap, and of those that stay."""
        masters = [s for s in self.states if s.key == "master_param"]
        swapping = sum(s.nbytes for s in masters if s.stays is None)
        return swapping, sum(s.nbytes for s in masters) - swapping

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held."""
        return self.ledger.host_bytes

    @property
    def idle_device_bytes(self) -> int:
        """Device bytes held for swapped states now: 0 between updates."""
        return self.ledger.device_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Most device bytes held for swapped states so far."""
        return self.ledger.peak_device_bytes

    def stay_counts(self) -> dict[StayReason, int]:
        """Count the states that stay, by reason."""
        return dict(Counter(s.stays for s in self.states if s.stays is not None))

    def __str__(self) -> str:
        """Tell the essentials in a few lines."""
        swapping = [s for s in self.states if s.stays is None]
        born = sum(s.born for s in swapping)
        lines = [
            f"{self.optimizer}, {'packed' if self.packed else 'per tensor'} swap",
            f"  swapped    {born} states exist of {len(swapping)} that swap, "
            f"{format_bytes(self.swapped_bytes)} of values",
            f"  host       {format_bytes(self.host_bytes)} "
            f"({'pinned' if self.pinned else 'pageable'})",
            f"  device     idle {format_bytes(self.idle_device_bytes)}, "
            f"peak {format_bytes(self.peak_device_bytes)}, "
            f"states that stay {format_bytes(self.resident_bytes)}",
            f"  batches    {self.batches}, "
            f"largest {format_bytes(max(self.batch_bytes, default=0))}",
            f"  moved      {format_bytes(self.ledger.bytes_loaded)} in, "
            f"{format_bytes(self.ledger.bytes_stored)} out, in {self.ledger.updates} updates",
        ]
        if any(self.master_bytes):
            swap, stay = map(format_bytes, self.master_bytes)
            lines.insert(2, f"  masters    {swap} of these swap, {stay} stay")
        for reason, count in self.stay_counts().items():
            lines.append(f"  stays      {count} of the states: {reason.value}")
        if self.decision:
            lines.append(f"  decided    {self.decision}")
        if self.last_step is not None:
            t = self.last_step
            lines.append(
                f"  last step  {t.total * 1e3:.2f} ms: load {t.load * 1e3:.2f}, "
                f"update {t.update * 1e3:.2f}, store {t.store * 1e3:.2f}, "
                f"states that stay {t.meanwhile * 1e3:.2f}, "
                f"compute waited {t.wait * 1e3:.2f}"
            )
        return "\n".join(lines)


def format_bytes(nbytes: int) -> str:
    """Write bytes with a binary unit: ``192.6 MiB``."""
    size = float(nbytes)
    unit = "B"
    # Compared as it is printed: 1048575 bytes are 1.0 MiB, not 1024.0 KiB.
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(abs(size), 1) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{int(size)} {unit}" if unit == "B" else f"{size:.1f} {unit}"
