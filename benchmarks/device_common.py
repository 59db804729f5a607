# SPDX-License-Identifier: Apache-2.0
"""What the sections of a device check share: the device by any name, its memory, and rows."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from swap_core import available_host_memory
from swap_testkit.torch import simulator
from swap_testkit.torch.simulator.role import SIMULATED, check_races, device_type

__all__ = ["Place", "available_host_bytes", "main", "row"]


def row(what: str, value: object, ok: bool | None = None, *, headline: bool = False) -> None:
    """Tell what was found. ``ok``: as expected or not; None where nothing is expected."""
    found = {"what": what, "value": str(value), "ok": ok, "headline": headline}
    print("@" + json.dumps(found), flush=True)


def available_host_bytes() -> int:
    """Of the host, or of the container that this is in; 0 where neither tells."""
    return available_host_memory() or 0


class Place:
    """The first device of a type, and how to ask about it whatever its type is.

    Args:
        device: ``cuda``, another accelerator's type, or ``sim``.
        out: The folder for files.
        until: When the section is ended, by the machine's monotonic clock.
    """

    def __init__(self, device: str, out: Path, until: float) -> None:
        self.asked = device
        self.out = out
        self.until = until
        self.simulated = device == SIMULATED
        self.kind = device_type(device)
        self.device = torch.device(self.kind, 0)
        torch.accelerator.set_device_index(0)

    def left(self) -> float:
        """Seconds until the section is ended."""
        return self.until - monotonic()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def allocated(self) -> int:
        return int(torch.accelerator.memory_allocated())

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> int:
        return int(torch.accelerator.max_memory_allocated())

    def reserved_peak(self) -> int | None:
        """Most bytes that the allocator took from the device, for any stream; None: not told."""
        stats = torch.accelerator.memory_stats()
        reserved = stats.get("reserved_bytes.all.peak")
        return None if reserved is None else int(reserved)

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.accelerator.get_memory_info()
        return int(free), int(total)

    def pinned(self) -> tuple[int, int] | None:
        """Bytes of pinned memory in use as the allocator took them, and how often it took any.

        None: this device does not tell.
        """
        if self.simulated:
            return simulator.pinned_bytes(), 0
        if self.kind == "cuda":
            stats = torch.cuda.host_memory_stats()
            if "allocated_bytes.current" in stats and "num_host_alloc" in stats:
                return int(stats["allocated_bytes.current"]), int(stats["num_host_alloc"])
        return None

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def check_races(self, what: str) -> None:
        """On the simulated accelerator: fail if the order of anything was left to luck."""
        check_races(self.asked, what)

    def event(self) -> torch.Event:
        return torch.Event(device=self.device, enable_timing=True)


def main(sections: Mapping[str, Callable[..., None]]) -> None:
    """Run the section that the command line names, with its other words as arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=sections)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, default=float("inf"))
    args = parser.parse_args()
    try:
        place: Any = Place(args.device, args.out, args.until)
        sections[args.section](place, *args.arguments)
    except Exception:  # noqa: BLE001  # whatever it is, the log tells, and the exit code
        traceback.print_exc()
        row("error", traceback.format_exc().splitlines()[-1][:300], False)
        sys.exit(1)
