# SPDX-License-Identifier: Apache-2.0
"""The MindSpore side of the testkit (extra ``mindspore``). Loads no torch."""

from swap_testkit.mindspore.recording import (
    MindSporeRecordingDevice,
    record_updates,
    region_of,
)

__all__ = ["MindSporeRecordingDevice", "record_updates", "region_of"]
