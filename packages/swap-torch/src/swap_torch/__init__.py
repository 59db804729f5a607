# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in pinned host memory, streamed through the accelerator in the update."""

from swap_core import Residency, SwapOptimizerConfig, SwapReport, SwapSlot, UpdateUnit
from swap_torch.__about__ import __version__
from swap_torch.adapter import TorchSwapAdapter
from swap_torch.api import is_swap_optimizer, swap_optimizer
from swap_torch.device import (
    AcceleratorDevice,
    DeviceMemory,
    TorchSwapDevice,
    Transfer,
    accelerator_device,
)
from swap_torch.optimizer import TorchSwapOptimizer
from swap_torch.per_parameter import PerParameterAdapter
from swap_torch.profiling import profiler_ranges

__all__ = [
    "AcceleratorDevice",
    "DeviceMemory",
    "PerParameterAdapter",
    "Residency",
    "SwapOptimizerConfig",
    "SwapReport",
    "SwapSlot",
    "TorchSwapAdapter",
    "TorchSwapDevice",
    "TorchSwapOptimizer",
    "Transfer",
    "UpdateUnit",
    "__version__",
    "accelerator_device",
    "is_swap_optimizer",
    "profiler_ranges",
    "swap_optimizer",
]
