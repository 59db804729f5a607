# SPDX-License-Identifier: Apache-2.0
"""A small task that the examples share, and the device that states swap on."""

from __future__ import annotations

import torch
from torch import nn

from swap_torch import SwapOptimizerConfig


def config(**options):
    """Small enough for a small model to swap; leave it out for a real one."""
    return SwapOptimizerConfig(min_numel=16, swap_times=3, **options)


def device():
    """None: that of the parameters. Without an accelerator, CPU tensors play its part."""
    if torch.accelerator.is_available():
        return None
    from swap_testkit.torch import CpuAsDevice

    return CpuAsDevice()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20))


def dataset() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(
        torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    )
