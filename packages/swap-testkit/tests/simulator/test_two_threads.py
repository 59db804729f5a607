# SPDX-License-Identifier: Apache-2.0
"""One device that threads of one process share."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Schedule
from swap_torch.device import DeviceMemory, Transfer, accelerator_device

DEVICE = "simnpu"
NUMEL = 4096


def test_a_block_waits_for_its_store_whatever_another_thread_releases_meanwhile() -> None:
    simulator.set_schedule(Schedule.LATEST)
    device = accelerator_device(torch.device(DEVICE, 0))
    ones, twos = (torch.full((NUMEL,), value, device=DEVICE) for value in (1.0, 2.0))
    memories = [
        DeviceMemory((each.untyped_storage(),), (each.untyped_storage().nbytes(),))
        for each in (ones, twos)
    ]
    torch.accelerator.synchronize()
    host = torch.zeros(NUMEL).pin_memory()
    device.copy_out(device.store_stream, [Transfer(ones, host)])
    threads: list[threading.Thread] = []

    def switch(frame: FrameType, event: str, what: object) -> None:
        """Let the other thread run right after the first ``set_`` of this one."""
        if event == "c_return" and getattr(what, "__name__", "") == "set_" and not threads:
            current = device.compute_stream()
            arguments = (memories[1], current)
            threads.append(threading.Thread(target=device.release_behind, args=arguments))
            threads[0].start()
            threads[0].join(timeout=10)

    sys.setprofile(switch)
    try:
        device.release_behind(memories[0], device.store_stream)
    finally:
        sys.setprofile(None)
    assert threads
    threads[0].join()
    again = [torch.full((NUMEL,), 3.0, device=DEVICE) for _ in range(2)]
    torch.accelerator.synchronize()
    assert host.tolist() == [1.0] * NUMEL
    assert simulator.races() == []
    del again
