# SPDX-License-Identifier: Apache-2.0
"""How much host memory a run needs, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swap_core.control_group import left_in_control_groups, lines_of
from swap_core.report import format_bytes

__all__ = ["HostMemory", "HostMemoryWarning", "available_host_memory"]


class HostMemoryWarning(RuntimeWarning):
    """The host has less memory than all states will need; the first step may be killed."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the states of one process need in host memory, and what the host has.

    ``str()`` tells it in a sentence.
    """

    needed_bytes: int
    """Of this process, when every state exists, as the allocator of pinned memory takes it."""
    held_bytes: int
    """Of these, what is allocated already."""
    processes: int
    """Processes of this host that need as much, as ``LOCAL_WORLD_SIZE`` tells; else 1."""
    available_bytes: int | None
    """What the host, a container or a job can still give; None: it does not tell."""

    @property
    def missing_bytes(self) -> int:
        """What all processes still need and the host does not have; 0 if it does not tell."""
        if self.available_bytes is None:
            return 0
        return max(0, (self.needed_bytes - self.held_bytes) * self.processes - self.available_bytes)

    def __str__(self) -> str:
        """Tell what is needed and what is free."""
        there = (
            "the host does not tell what is available"
            if self.available_bytes is None
            else f"{format_bytes(self.available_bytes)} are available"
        )
        each = f"{self.processes} processes x " if self.processes > 1 else ""
        held = f", of which {format_bytes(self.held_bytes)} are held" if self.held_bytes else ""
        return (
            f"optimizer states need {each}{format_bytes(self.needed_bytes)} of host memory{held}; "
            f"{there}"
        )


def available_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process could still allocate without swapping out others.

    The least of what the kernel calls available (``MemAvailable`` in /proc/meminfo) and what the
    limits of the process's control group and of all above it leave, version 2 (``memory.max``) or
    1: those of a container, a Slurm job, a systemd unit. File caches count as free.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        None where the system does not tell, as outside Linux.
    """
    found = [_available_of_host(root / "proc/meminfo"), left_in_control_groups(root)]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _available_of_host(meminfo: Path) -> int | None:
    for line in lines_of(meminfo):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None
