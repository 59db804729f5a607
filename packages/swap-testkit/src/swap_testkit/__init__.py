# SPDX-License-Identifier: Apache-2.0
"""Prove that optimizer-state swapping changes nothing but memory and time."""

from swap_testkit.__about__ import __version__
from swap_testkit.alignment import Alignment, Memory, Mismatch, RunRecord
from swap_testkit.api import align, assert_aligned
from swap_testkit.array import Array, Tolerance
from swap_testkit.order import Unordered, check_order
from swap_testkit.recording import Op, RecordingDevice, Region, Regions, Tamper

__all__ = [
    "Alignment",
    "Array",
    "Memory",
    "Mismatch",
    "Op",
    "RecordingDevice",
    "Region",
    "Regions",
    "RunRecord",
    "Tamper",
    "Tolerance",
    "Unordered",
    "__version__",
    "align",
    "assert_aligned",
    "check_order",
]
