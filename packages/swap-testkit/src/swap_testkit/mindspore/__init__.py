# SPDX-License-Identifier: Apache-2.0
"""The MindSpore side of the testkit (extra ``mindspore``). Loads no torch."""

from swap_testkit.mindspore.recording import (
    MindSporeRecordingDevice,
    record_updates,
    region_of,
)
from swap_testkit.mindspore.trainer import Job

__all__ = ["Job", "MindSporeRecordingDevice", "record_updates", "region_of"]
