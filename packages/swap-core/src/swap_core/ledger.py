# SPDX-License-Identifier: Apache-2.0
"""What one optimizer's swapping did so far, counted where it happens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ledger"]


@dataclass(slots=True)
class Ledger:
    """Counters since wrapping. Bytes are bytes of states and arenas, not of kernels."""

    updates: int = 0
    """Updates that moved anything."""
    copies_in: int = 0
    copies_out: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    restores: int = 0
    """Times that device memory was taken."""
    plans_built: int = 0
    views_made: int = 0
    """Tensors bound to device or host memory; none are made in the steady state."""
    host_allocations: int = 0
    host_bytes: int = 0
    """Bytes of host segments."""
    device_bytes: int = 0
    """Device bytes held for swapped states now."""
    peak_device_bytes: int = 0
    """Most device bytes held for swapped states at any time."""

    def hold(self, nbytes: int) -> None:
        """Count device memory that was taken."""
        self.restores += 1
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def drop(self, nbytes: int) -> None:
        """Count device memory that was given back."""
        self.device_bytes -= nbytes
