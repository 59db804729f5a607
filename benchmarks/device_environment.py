# SPDX-License-Identifier: Apache-2.0
"""The sections of a device check that tell what is there: versions, and the link."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from device_common import Place, available_host_bytes, main, row

import swap_core
import swap_torch
from swap_core import format_bytes

PATIENCE = 10.0
"""Seconds for another program: without its daemon nvidia-smi takes some."""


def environment(place: Place) -> None:
    row("python", f"{platform.python_version()} at {sys.executable}")
    row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    row("swap-core, swap-torch", f"{swap_core.__version__}, {swap_torch.__version__}")
    row("device", f"{card_name(place)}, {torch.accelerator.device_count()} of it", headline=True)
    if not place.simulated:
        free, total = place.free_and_total()
        row("device memory", f"{format_bytes(free)} free of {format_bytes(total)}")
        row(
            "driver", output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        )
    row("host", f"{os.cpu_count()} cores, this process may use {len(os.sched_getaffinity(0))}")
    row("host memory", format_bytes(available_host_bytes()) + " available")
    row("limit of locked memory", output_of("bash", "-c", "ulimit -l") + " KiB")
    row("NUMA nodes", len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    settings = {k: v for k, v in os.environ.items() if k.startswith(("PYTORCH_", "CUDA_", "NCCL_"))}
    row("settings", settings or "none")
    names = ("numpy", "rich", "matplotlib", "torchao", "deepspeed", "torchtitan_npu", "torch_npu")
    row(
        "packages", ", ".join(n for n in names if importlib.util.find_spec(n)) or "none of interest"
    )


def card_name(place: Place) -> str:
    return torch.cuda.get_device_name(0) if place.kind == "cuda" else place.kind


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout or done.stderr).strip().replace("\n", ", ")


def link(place: Place) -> None:
    """Both directions alone and together, for blocks of some sizes; and what pinning costs."""
    largest = 4 << 20 if place.simulated else 256 << 20
    # The first call of all makes the device's context, which takes seconds.
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).to(place.device)
    place.synchronize()
    start = perf_counter()
    hosts = [torch.empty(largest, dtype=torch.uint8, pin_memory=True).zero_() for _ in range(2)]
    seconds = perf_counter() - start
    pinning = 2 * largest / seconds
    row("pinning and clearing", f"{pinning / 1e9:.2f} GB/s")
    devices = [torch.zeros(largest, dtype=torch.uint8, device=place.device) for _ in range(2)]
    streams = [torch.Stream(device=place.device) for _ in range(2)]
    place.synchronize()
    found: dict[str, float] = {}
    for nbytes in (largest // 64, largest // 8, largest):

        def load(nbytes: int = nbytes) -> None:
            devices[0][:nbytes].copy_(hosts[0][:nbytes], non_blocking=True)

        def store(nbytes: int = nbytes) -> None:
            hosts[1][:nbytes].copy_(devices[1][:nbytes], non_blocking=True)

        budget = (16 << 20) if place.simulated else (8 << 30)
        count = max(2, min(200, budget // nbytes))
        (alone_in,) = rates(place, streams, [load], nbytes, count)
        (alone_out,) = rates(place, streams, [store], nbytes, count)
        together = rates(place, streams, [load, store], nbytes, count)
        found = dict(
            zip(
                ("in", "out", "in_of_both", "out_of_both"),
                (alone_in, alone_out, *together),
                strict=True,
            )
        )
        told = (
            f"{alone_in / 1e9:.1f} in, {alone_out / 1e9:.1f} out, "
            f"both at once {together[0] / 1e9:.1f} in and {together[1] / 1e9:.1f} out GB/s"
        )
        row(f"{format_bytes(nbytes)} copies", told, headline=nbytes == largest)
    (place.out / "link.json").write_text(json.dumps({"pin": pinning, **found}))
    place.check_races("copies")


def rates(
    place: Place,
    streams: Sequence[torch.Stream],
    copies: Sequence[Callable[[], None]],
    nbytes: int,
    count: int,
) -> list[float]:
    """Bytes per second of each copy, repeated, when all run at once on a stream of their own."""
    marks = [[place.event() for _ in range(2)] for _ in copies]
    for turn in range(-1, count):
        for copy, stream, (begin, _) in zip(copies, streams, marks, strict=False):
            with stream:
                if turn == 0:
                    begin.record(stream)
                copy()
    for stream, (_, end) in zip(streams, marks, strict=False):
        end.record(stream)
    place.synchronize()
    return [1e3 * nbytes * count / begin.elapsed_time(end) for begin, end in marks]


if __name__ == "__main__":
    main({"environment": environment, "link": link})
