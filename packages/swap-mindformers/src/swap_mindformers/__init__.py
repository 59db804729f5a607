# SPDX-License-Identifier: Apache-2.0
"""States and fp32 master parameters of MindFormers AdamW in host memory between updates.

The adapter is found by :func:`swap_mindspore.swap_optimizer` once this is installed.
"""

from swap_mindformers.__about__ import __version__
from swap_mindformers.adamw import MindFormersAdamWAdapter
from swap_mindformers.structure import KNOWN_VERSIONS
from swap_mindspore import SwapOptimizerConfig, SwapReport, is_swap_optimizer, swap_optimizer

__all__ = [
    "KNOWN_VERSIONS",
    "MindFormersAdamWAdapter",
    "SwapOptimizerConfig",
    "SwapReport",
    "__version__",
    "is_swap_optimizer",
    "swap_optimizer",
]
