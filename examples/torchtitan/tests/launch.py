# SPDX-License-Identifier: Apache-2.0
"""Run torchtitan's trainer without an accelerator: ``launch.py <cpu|sim> <arguments>``.

Arguments are those of torchtitan.train; ``---`` between them begins another training in the same
processes, since importing torchtitan takes longer than a training. For tests only: on a machine
with an accelerator, ``torchrun -m torchtitan.train`` needs none of this.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402

DEVICE = "TITAN_TEST_DEVICE"
"""Environment variable, for processes that the checkpointer starts and that run this file again."""

MEETING = "TITAN_TEST_MEETING"
"""Environment variable: an empty folder through which ranks find each other. Ports that were free
when the first training began may not be when the next one does."""


def prepare(device: str) -> None:
    """Make a device available, before torchtitan looks for one while it is imported."""
    torch.set_num_threads(1)
    if device == "sim":
        _simulate()
    elif device == "cpu":
        _pose_as_accelerator()
    if "set_timeout" not in dir(torch.distributed):
        # torch 2.13 has it under another name; torchtitan 0.3 calls it after the first step.
        set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
        torch.distributed.set_timeout = lambda timeout, group=None: set_timeout(timeout, group)


def _simulate() -> None:
    from swap_testkit.torch.simulator.role import device_type

    device_type("sim")


def _pose_as_accelerator() -> None:
    """torchtitan takes the CPU for CUDA otherwise."""
    from torchtitan.tools import utils

    nothing = staticmethod(lambda *_: None)
    properties = types.SimpleNamespace(total_memory=2**33, name="cpu")
    methods = {
        "device_count": staticmethod(lambda: 1),
        "current_device": staticmethod(lambda: 0),
        "get_device_name": staticmethod(lambda *_: "cpu"),
        "get_device_properties": staticmethod(lambda *_: properties),
        "memory_stats": staticmethod(lambda *_: {}),
    }
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"):
        methods[name] = nothing
    utils.device_type, utils.device_module = "cpu", type("Cpu", (), methods)

    from swap_testkit.torch import CpuAsDevice
    from swap_torch.integrations.torchtitan.container import SwapMixin

    SwapMixin.swap_device = lambda _: CpuAsDevice()


def runs(arguments: list[str]) -> list[list[str]]:
    """Cut at ``---``."""
    found: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "---":
            found.append([])
        else:
            found[-1].append(argument)
    return found


def main() -> None:
    import torchtitan.trainer
    from torch.distributed.tensor import _random, debug
    from torchtitan.train import main as train

    # It sleeps two seconds at the end of each training.
    torchtitan.trainer.time = types.SimpleNamespace(
        perf_counter=torchtitan.trainer.time.perf_counter, sleep=lambda _: None
    )
    initialize = torch.distributed.init_process_group
    for number, arguments in enumerate(runs(sys.argv[2:])):
        torch.distributed.init_process_group = functools.partial(
            initialize,
            init_method=f"file://{os.environ[MEETING]}/{number}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        sys.argv[1:] = arguments
        # What DTensor remembers holds the device mesh of the training before, and FSDP2 looks
        # whether meshes are the same object.
        debug._clear_sharding_prop_cache()
        # Made with the first random DTensor of a process, and takes over rank 0's seed then.
        _random._rng_tracker = None
        train()
        # torchtitan switches Python's collector off, and models are in cycles.
        gc.collect()


if __name__ == "__main__":
    os.environ[DEVICE] = sys.argv[1]
prepare(os.environ[DEVICE])
if __name__ == "__main__":
    main()
    from swap_testkit.torch.simulator.role import check_races

    check_races(os.environ[DEVICE], "the training")
