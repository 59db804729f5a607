# SPDX-License-Identifier: Apache-2.0
"""Numbers of common cards, for forecasts.

Rates of memory are what the source says. Rates of links are those of the bus standard in each
direction times 0.8, an allowance for its protocol, unless the source measured them. Some hosts are
slower in both directions at once; a number that was measured on the machine is better than any here
(``benchmarks/device_check.sh`` measures it).

Each source is a text that says the number and that was read; the vendors' own pages could not be
opened, so where it cites one it is not named here.
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


_TORCH = "https://github.com/pytorch/pytorch (torch/_inductor/analysis/device_info.py)"
_KLOCKWOOD = "https://glennklockwood.com/garden/processors/A100"
_OPENMETAL = (
    "https://openmetal.io/resources/blog/how-the-h200-is-built-for-memory-bound-ai-workloads/"
)

PRESETS = {
    "a100-40gb": Preset(
        Hardware(_PCIE_4, _PCIE_4, 1555 * _GB),
        f"1,555 GB/s, PCIe 4.0 x16; {_KLOCKWOOD}, which cites the data sheet",
    ),
    "a100-80gb": Preset(
        Hardware(_PCIE_4, _PCIE_4, 2039 * _GB),
        f"A100 80GB SXM: 2,039 GB/s; {_TORCH}, which cites the data sheet. "
        f"PCIe 4.0 x16; {_KLOCKWOOD}",
    ),
    "h100-sxm": Preset(
        Hardware(_PCIE_5, _PCIE_5, 3350 * _GB),
        f"H100 SXM: 3.35 TB/s; {_TORCH}, which cites NVIDIA's page. PCIe 5.0 x16; "
        "https://github.com/ArthurChiao/arthurchiao.github.io (2023-10-25-gpu-data-sheets)",
    ),
    "h200": Preset(
        Hardware(_PCIE_5, _PCIE_5, 4800 * _GB),
        f"H200 SXM: 4.8 TB/s; {_OPENMETAL}. PCIe 5.0 x16; "
        "https://github.com/mlcommons/inference_results_v4.1 (closed/NVIDIA/systems)",
    ),
    "b200": Preset(
        Hardware(_PCIE_5, _PCIE_5, 7672 * _GB),
        "7.672 TB/s as the driver tells; https://github.com/pytorch/ao/pull/4002. PCIe 5.0 x16; "
        "https://github.com/mlcommons/inference_results_v6.0 (closed/Nebius/systems)",
    ),
    "l40s": Preset(
        Hardware(_PCIE_4, _PCIE_4, 864 * _GB),
        "864 GB/s, PCIe 4.0 x16; https://www.itcreations.com/nvidia-gpu/nvidia-l40s-gpu-accelerator",
    ),
    "atlas-800t-a2": Preset(
        Hardware(24.9 * _GB, 24.9 * _GB, 1600 * _GB),
        "24.9 GB/s to the device as ascend-dmi measured; https://github.com/FlagOpen/FlagPerf/blob/"
        "5a30cd2a92e3185a3e14e2bed9c0939c6e5ed1bf/base/toolkits/interconnect-h2d/ascend/README.md. "
        "Assumed: as much to the host at once. Memory 1.6 TB/s, not the vendor's number; "
        "https://github.com/JiusiServe/light-llm-simulator (conf/hardware_config.py)",
    ),
}
"""Cards by the name that ``--preset`` takes."""
