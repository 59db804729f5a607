# SPDX-License-Identifier: Apache-2.0
"""Numbers of common cards, for forecasts.

Rates of memory are the makers'. Rates of links are those of the bus standard in each direction
times 0.8, an allowance for its protocol; a number that was measured on the machine is better.
"""

from __future__ import annotations

from dataclasses import dataclass

from swap_core.forecast import Hardware

__all__ = ["PRESETS", "Preset"]

_GB = 1e9
_PCIE_4, _PCIE_5 = 0.8 * 32 * _GB, 0.8 * 64 * _GB


@dataclass(frozen=True, slots=True)
class Preset:
    """A card."""

    hardware: Hardware
    source: str
    """Where the numbers are from."""


PRESETS = {
    "a100-80gb": Preset(
        Hardware(_PCIE_4, _PCIE_4, 2039 * _GB),
        "NVIDIA A100 80GB SXM data sheet: 2,039 GB/s; PCIe 4.0 x16",
    ),
    "h100-sxm": Preset(
        Hardware(_PCIE_5, _PCIE_5, 3350 * _GB),
        "NVIDIA H100 SXM data sheet: 3.35 TB/s; PCIe 5.0 x16",
    ),
    "h200": Preset(
        Hardware(_PCIE_5, _PCIE_5, 4800 * _GB),
        "NVIDIA H200 data sheet: 4.8 TB/s; PCIe 5.0 x16",
    ),
}
"""Cards by the name that ``--preset`` takes."""
