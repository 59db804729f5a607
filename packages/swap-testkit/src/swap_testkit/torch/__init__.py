# SPDX-License-Identifier: Apache-2.0
"""The torch side of the testkit (extra ``torch``)."""

from swap_testkit.torch.compare import Difference, assert_same_bits, differences, same_bits
from swap_testkit.torch.cpu_device import CopySchedule, CpuAsDevice
from swap_testkit.torch.recording import TorchRecordingDevice, record_updates, regions_of

__all__ = [
    "CopySchedule",
    "CpuAsDevice",
    "Difference",
    "TorchRecordingDevice",
    "assert_same_bits",
    "differences",
    "record_updates",
    "regions_of",
    "same_bits",
]
