# SPDX-License-Identifier: Apache-2.0
"""Threads of the simulator: how many, what they cost while they wait, and when they end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from swap_testkit.torch import launch, simulator
from swap_testkit.torch.simulator import Schedule
from swap_testkit.torch.simulator.process_group import BACKEND

DEVICE = "simnpu"
POOL = 32


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def settles(value: Callable[[], int], expected: int) -> int:
    """Return ``value()``, as soon as it is ``expected``: the system forgets threads a bit later."""
    deadline = time.monotonic() + 10
    while value() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return value()


def use(streams: list[torch.Stream]) -> None:
    ones = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    for stream in streams:
        with stream:
            ones + 1
    torch.accelerator.synchronize()


def test_streams_have_threads_from_their_first_task_until_the_schedule_is_another() -> None:
    before = threads()
    simulator.set_schedule(Schedule.THREADS)
    streams = [torch.Stream(device=DEVICE) for _ in range(3 * POOL)]
    assert threads() == before
    use(streams[:1])
    few = threads()
    assert before < few <= before + 2  # the default stream's, too
    use(streams)
    assert threads() == before + 1 + POOL
    simulator.set_schedule(Schedule.THREADS)
    use(streams)
    assert threads() == before + 1 + POOL
    for schedule in (Schedule.EARLIEST, Schedule.LATEST):
        simulator.set_schedule(schedule)
        assert settles(threads, before) == before
        use(streams)
        assert threads() == before


def test_a_task_wakes_only_those_who_wait_for_it() -> None:
    simulator.set_schedule(Schedule.THREADS)
    streams = [torch.Stream(device=DEVICE) for _ in range(POOL)]
    use(streams)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(100):
        use(streams[:1])
        time.sleep(0.002)  # for others to go back to sleep
    after = resource.getrusage(resource.RUSAGE_SELF)
    # All of the threads, with each task, would be 100 * 32.
    assert after.ru_nvcsw - before.ru_nvcsw < 100 * POOL / 2


def groups_come_and_go() -> list[int]:
    """The number of threads with 0, 1 and 6 groups more, and after these were destroyed."""

    def more(count: int) -> list[dist.ProcessGroup]:
        groups = [dist.new_group(backend=BACKEND) for _ in range(count)]
        for group in groups:
            for device in (torch.device(DEVICE, dist.get_rank()), torch.device("cpu")):
                dist.all_reduce(torch.ones(1, device=device), group=group)
        return groups

    counts = [threads()]
    groups = more(1)
    counts.append(threads())
    groups += more(5)
    counts.append(threads())
    for group in groups:  # which the list still holds, as meshes hold theirs
        dist.destroy_process_group(group)
    counts.append(settles(threads, counts[0]))
    return counts


@pytest.mark.parametrize("nproc", [1, 2])
def test_groups_have_two_threads_until_they_are_destroyed(nproc: int) -> None:
    for counts in launch(groups_come_and_go, nproc=nproc, device="sim"):
        assert [count - counts[0] for count in counts] == [0, 2, 12, 0]


PROGRAM = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Link, Schedule
from swap_testkit.torch.simulator.role import device_type

device = torch.device(device_type("sim"), 0)
ones, host = torch.ones(4, device=device), torch.zeros(4).pin_memory()
torch.accelerator.synchronize()
"""

QUEUED = """
dist.init_process_group("simccl", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group() for _ in range(20)]
simulator.set_schedule(Schedule.THREADS, link=Link(latency=1.0))

def queue():
    for _ in range(60):
        with torch.Stream(device=device):
            host.copy_(ones, non_blocking=True)
    simulator.races()

queue()
threading.Thread(target=lambda: (time.sleep(0.5), queue())).start()
"""

FORKED = """
simulator.set_schedule(Schedule.THREADS, link=Link(latency=1.0))
host.copy_(ones, non_blocking=True)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
signal.alarm(60)  # nobody else would end one that hangs
"""


@pytest.mark.parametrize("rest", [QUEUED, FORKED], ids=["work is queued", "forked"])
def test_a_process_ends_at_once(rest: str) -> None:
    program = PROGRAM + rest + "print('end', flush=True)"
    others = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "end\n"
            # On a machine that has other things to do.
            busy = [sys.executable, "-c", "while True: pass"]
            others = [subprocess.Popen(busy) for _ in range(os.cpu_count() or 1)]
            assert process.wait(timeout=20) == 0
        finally:
            for each in (process, *others):
                each.kill()
                each.wait()
