# SPDX-License-Identifier: Apache-2.0
"""The control groups of this process: Slurm, systemd and containers limit memory with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["left_in_control_groups", "lines_of"]


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a version of control groups is, and what its files are called."""

    mount: str
    controller: str
    """As ``/proc/self/cgroup`` names the hierarchy."""
    limit: str
    used: str
    cache: str
    """In ``memory.stat``: file pages, of the group and those below it, that nobody uses now."""


_VERSIONS = (
    _Version("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    _Version(
        "sys/fs/cgroup/memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def left_in_control_groups(root: Path) -> int | None:
    """Bytes that this process could still take before one of its groups is at its limit.

    A group limits those below it too, so of the process's own group and all above it the one that
    leaves least counts. A container may see its own group at the root, and nothing above it.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        None where no group has a limit.
    """
    left = (_left_in(group, version) for version in _VERSIONS for group in _groups(root, version))
    return min((nbytes for nbytes in left if nbytes is not None), default=None)


def lines_of(path: Path) -> list[str]:
    """Lines of a file of the kernel; none if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    # Names may have what str.splitlines takes for the end of a line.
    return [line for line in text.split("\n") if line]


def _groups(root: Path, version: _Version) -> Iterator[Path]:
    """Directories of the process's own group and all above it, that exist or not."""
    yield root / version.mount
    for line in lines_of(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        parts = [part for part in path.split("/") if part]
        if version.controller in controllers.split(",") and ".." not in parts:
            group = root / version.mount
            for part in parts:
                group /= part
                yield group


def _left_in(group: Path, version: _Version) -> int | None:
    allowed = "".join(lines_of(group / version.limit))
    used = "".join(lines_of(group / version.used))
    if not (allowed.isdigit() and used.isdigit()):
        return None
    # File caches are given back when the group is short of memory.
    told = dict(line.split(" ", 1) for line in lines_of(group / "memory.stat") if " " in line)
    return max(0, int(allowed) - int(used) + int(told.get(version.cache, 0)))
