# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from swap_core import HostMemory, available_host_memory

MEMINFO = "MemTotal:  100 kB\nMemFree:  5 kB\nMemAvailable:   40 kB\n"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO)
    assert available_host_memory(tmp_path) == 40 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat", "left"),
    [
        ("30000\n", "20000\n", "anon 5\ninactive_file 7000\n", 17_000),
        ("30000\n", "50000\n", "inactive_file 7000\n", 0),
        ("max\n", "20000\n", "inactive_file 7000\n", 40 * 1024),
        ("90000\n", "20000\n", "", 40 * 1024),
    ],
)
def test_is_no_more_than_the_control_group_leaves(
    tmp_path: Path, limit: str, used: str, stat: str, left: int
) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    write(tmp_path, proc__meminfo=MEMINFO)
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(used)
    (group / "memory.stat").write_text(stat)
    assert available_host_memory(tmp_path) == left


def test_knows_control_groups_of_version_1(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    write(tmp_path, proc__meminfo=MEMINFO)
    (group / "memory.limit_in_bytes").write_text("30000\n")
    (group / "memory.usage_in_bytes").write_text("20000\n")
    (group / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50\n")
    assert available_host_memory(tmp_path) == 10_050


def test_is_unknown_where_nothing_tells(tmp_path: Path) -> None:
    assert available_host_memory(tmp_path) is None
    assert HostMemory(5, 0, 1, None).missing_bytes == 0
    assert "does not tell" in str(HostMemory(5, 0, 1, None))


def test_counts_what_all_processes_still_lack() -> None:
    need = HostMemory(needed_bytes=10 * 2**30, held_bytes=2**30, processes=8, available_bytes=2**36)
    assert need.missing_bytes == 8 * 9 * 2**30 - 2**36
    assert str(need) == (
        "optimizer states need 8 processes x 10.0 GiB of host memory, of which 1.0 GiB are held; "
        "64.0 GiB are available"
    )
    assert HostMemory(10, 0, 1, 10).missing_bytes == 0
