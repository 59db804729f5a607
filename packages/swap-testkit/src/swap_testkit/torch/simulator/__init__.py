# SPDX-License-Identifier: Apache-2.0
"""A simulated accelerator: a device type of its own, on the CPU, that checks what runs on it.

::

    from swap_testkit.torch import simulator

    simulator.enable(name="simnpu", devices=2, memory_limit=2**30)
    model.to("simnpu")
    ...
    assert simulator.races() == []
"""

from swap_testkit.torch.simulator.build import BuildError
from swap_testkit.torch.simulator.control import (
    enable,
    enabled_name,
    mark_private_format,
    scheduled,
    set_memory_limit,
    set_pinned_limit,
    set_quirks,
    set_schedule,
)
from swap_testkit.torch.simulator.settings import NPU_QUIRKS, Link, Quirks, Race, Schedule
from swap_testkit.torch.simulator.watch import (
    fallbacks,
    host_read,
    host_write,
    pinned_bytes,
    pinned_peak_bytes,
    queued_operations,
    race_count,
    races,
    raise_on_race,
    reset,
    strict_free,
)

__all__ = [
    "NPU_QUIRKS",
    "BuildError",
    "Link",
    "Quirks",
    "Race",
    "Schedule",
    "enable",
    "enabled_name",
    "fallbacks",
    "host_read",
    "host_write",
    "mark_private_format",
    "pinned_bytes",
    "pinned_peak_bytes",
    "queued_operations",
    "race_count",
    "races",
    "raise_on_race",
    "reset",
    "scheduled",
    "set_memory_limit",
    "set_pinned_limit",
    "set_quirks",
    "set_schedule",
    "strict_free",
]
