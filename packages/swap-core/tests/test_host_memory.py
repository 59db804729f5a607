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


SLURM = "system.slice/slurmstepd.scope/job_7"
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def make_group(
    root: Path, files: tuple[str, str, str], path: str, *, limit: str, used: int, cache: int = 0
) -> None:
    """A control group under ``sys/fs/cgroup``."""
    group = root / "sys/fs/cgroup" / path
    group.mkdir(parents=True, exist_ok=True)
    (group / files[0]).write_text(f"{limit}\n")
    (group / files[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{files[2]} {cache}\n")


def belong(root: Path, *lines: str) -> None:
    """Write what the kernel says of the groups of this process."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines)
    (root / "proc/self/cgroup").write_bytes(text.encode())
    write(root, proc__meminfo=MEMINFO)


GROUPS = {
    "a job of Slurm": (V2, f"0::/{SLURM}", SLURM),
    "a task of a job": (V2, f"0::/{SLURM}/step_0/user/task_0", SLURM),
    "a unit of systemd": (V2, "0::/system.slice/train.service", "system.slice/train.service"),
    "a slice above it": (V2, "0::/user.slice/user-1.slice/run-1.scope", "user.slice"),
    "a name with a colon": (V2, "0::/a:b/c", "a:b"),
    "a name that is not ASCII": (V2, "0::/用户\u2028/c", "用户\u2028"),
    "a group that was removed": (V2, "0::/user.slice/x (deleted)", "user.slice"),
    "a container that sees only itself": (V2, "0::/", ""),
    "a container that is told a path it cannot see": (V1, "4:memory:/docker/123", "memory"),
    "a group from outside a namespace": (V2, "0::/../other", ""),
    "version 1": (V1, "4:memory:/slurm/uid_0/job_7/step_0", "memory/slurm/uid_0/job_7"),
    "version 1, joined": (V1, "4:cpu,memory:/slurm/job_7", "memory/slurm/job_7"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_is_no_more_than_every_group_of_the_process_leaves(tmp_path: Path, name: str) -> None:
    files, line, limiting = GROUPS[name]
    belong(tmp_path, "9:name=systemd:/elsewhere", line)
    make_group(tmp_path, files, limiting, limit="30000", used=20_000, cache=50)
    assert available_host_memory(tmp_path) == 10_050


@pytest.mark.parametrize("smallest", range(3))
def test_the_group_that_leaves_least_counts(tmp_path: Path, smallest: int) -> None:
    belong(tmp_path, "0::/a/b")
    for depth, path in enumerate(["", "a", "a/b"]):
        make_group(tmp_path, V2, path, limit="30000", used=29_000 if depth == smallest else 7)
    assert available_host_memory(tmp_path) == 1000


def test_both_versions_at_once_count(tmp_path: Path) -> None:
    belong(tmp_path, "0::/new", "4:memory:/old")
    make_group(tmp_path, V2, "new", limit="30000", used=10_000)
    make_group(tmp_path, V1, "memory/old", limit="30000", used=20_000)
    assert available_host_memory(tmp_path) == 10_000


def test_groups_of_others_and_groups_without_a_limit_do_not_count(tmp_path: Path) -> None:
    belong(tmp_path, f"0::/{SLURM}/step_0")
    make_group(tmp_path, V2, SLURM, limit="max", used=20_000)
    make_group(tmp_path, V2, f"{SLURM}/step_1", limit="30000", used=30_000)
    make_group(tmp_path, V2, "other", limit="30000", used=30_000)
    (tmp_path / "sys/fs/cgroup" / SLURM / "step_0").mkdir()
    assert available_host_memory(tmp_path) == 40 * 1024


def test_this_process_can_read_its_own() -> None:
    available = available_host_memory()
    assert available is None or available > 0


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
