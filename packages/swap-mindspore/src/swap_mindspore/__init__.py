# SPDX-License-Identifier: Apache-2.0
"""States of nn.Adam and nn.AdamWeightDecay in host memory, on the device only in the update."""

from swap_core import Residency, SwapOptimizerConfig, SwapReport, SwapSlot, UpdateUnit
from swap_mindspore.__about__ import __version__
from swap_mindspore.adapter import MindSporeSwapAdapter
from swap_mindspore.api import is_swap_optimizer, swap_optimizer
from swap_mindspore.arena import Arena, Piece, Segment
from swap_mindspore.ascend import AscendDevice, ascend_device
from swap_mindspore.device import DeviceMemory, MindSporeSwapDevice, Transfer
from swap_mindspore.host import HostDevice
from swap_mindspore.optimizer import MindSporeSwapOptimizer

__all__ = [
    "Arena",
    "AscendDevice",
    "DeviceMemory",
    "HostDevice",
    "MindSporeSwapAdapter",
    "MindSporeSwapDevice",
    "MindSporeSwapOptimizer",
    "Piece",
    "Residency",
    "Segment",
    "SwapOptimizerConfig",
    "SwapReport",
    "SwapSlot",
    "Transfer",
    "UpdateUnit",
    "__version__",
    "ascend_device",
    "is_swap_optimizer",
    "swap_optimizer",
]
