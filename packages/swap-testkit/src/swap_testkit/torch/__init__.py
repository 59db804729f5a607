# SPDX-License-Identifier: Apache-2.0
"""The torch side of the testkit (extra ``torch``)."""

from swap_testkit.torch.compare import Difference, assert_same_bits, differences, same_bits
from swap_testkit.torch.cpu_device import CopySchedule, CpuAsDevice
from swap_testkit.torch.launch import RankFailedError, launch
from swap_testkit.torch.recording import (
    TorchRecordingDevice,
    host_region_of,
    record_updates,
    regions_of,
)
from swap_testkit.torch.trainer import Job, Trainer

__all__ = [
    "CopySchedule",
    "CpuAsDevice",
    "Difference",
    "Job",
    "RankFailedError",
    "TorchRecordingDevice",
    "Trainer",
    "assert_same_bits",
    "differences",
    "host_region_of",
    "launch",
    "record_updates",
    "regions_of",
    "same_bits",
]
