# SPDX-License-Identifier: Apache-2.0
"""Numbers of common cards, for forecasts.

Rates of memory are what the source says. Rates of links are those of the bus standard in each
direction times 0.8, an allowance for its protocol, unless the source measured them. Some hosts are
slower in both directions at once; a number that was measured on the machine is better than any here
(``benchmarks/device_check.sh`` measures it).
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


_NVIDIA = "https://www.nvidia.com"

PRESETS = {
    "a100-40gb": Preset(
        Hardware(_PCIE_4, _PCIE_4, 1555 * _GB),
        f"data sheet, A100 40GB: 1,555 GB/s, PCIe 4.0 x16; {_NVIDIA}/en-us/data-center/a100/",
    ),
    "a100-80gb": Preset(
        Hardware(_PCIE_4, _PCIE_4, 2039 * _GB),
        f"data sheet, A100 80GB SXM: 2,039 GB/s, PCIe 4.0 x16; {_NVIDIA}/en-us/data-center/a100/",
    ),
    "h100-sxm": Preset(
        Hardware(_PCIE_5, _PCIE_5, 3350 * _GB),
        f"data sheet, H100 SXM: 3.35 TB/s, PCIe 5.0 x16; {_NVIDIA}/en-us/data-center/h100/",
    ),
    "h200": Preset(
        Hardware(_PCIE_5, _PCIE_5, 4800 * _GB),
        f"data sheet, H200 SXM: 4.8 TB/s, PCIe 5.0 x16; {_NVIDIA}/en-us/data-center/h200/",
    ),
    "b200": Preset(
        Hardware(_PCIE_5, _PCIE_5, 7672 * _GB),
        "7.672 TB/s as the driver tells; https://github.com/pytorch/ao/pull/4002. PCIe 5.0 x16",
    ),
    "l40s": Preset(
        Hardware(_PCIE_4, _PCIE_4, 864 * _GB),
        f"data sheet, L40S: 864 GB/s, PCIe 4.0 x16; {_NVIDIA}/en-us/data-center/l40s/",
    ),
    "atlas-800t-a2": Preset(
        Hardware(24.9 * _GB, 24.9 * _GB, 1500 * _GB),
        "24.9 GB/s to the device as ascend-dmi measured; https://github.com/FlagOpen/FlagPerf "
        "(interconnect-h2d/ascend). Assumed: as much to the host at once, and 1,500 GB/s of memory",
    ),
}
"""Cards by the name that ``--preset`` takes."""
