# SPDX-License-Identifier: Apache-2.0
"""Prove that optimizer-state swapping changes nothing but memory and time."""

from swap_testkit.__about__ import __version__
from swap_testkit.order import Unordered, check_order
from swap_testkit.recording import Op, RecordingDevice, Region, Regions, Tamper

__all__ = [
    "Op",
    "RecordingDevice",
    "Region",
    "Regions",
    "Tamper",
    "Unordered",
    "__version__",
    "check_order",
]
