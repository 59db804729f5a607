# SPDX-License-Identifier: Apache-2.0
"""The sections of a device check that measure a model of some billions of parameters.

Times are of the whole update: what the training waits for. The floor is what the link alone takes,
as the section ``link`` measured it with both directions busy.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
from device_common import Place, available_host_bytes, main, row

from swap_core import format_bytes
from swap_torch import SwapOptimizerConfig, swap_optimizer

STEPS = 5
SIMULATED_SCALE = 1e-4
"""Of a rehearsal: its parameters are hundred thousands."""
WIDTHS = ((1e7, 64), (5e8, 768), (2e9, 2048), (1e99, 3072))


def shapes(total: float) -> Iterator[tuple[int, ...]]:
    """A decoder of about ``total`` parameters."""
    width = next(width for limit, width in WIDTHS if total < limit)
    words = 10 * width
    layers = max(1, round((total - 2 * words * width) / (12 * width * width)))
    yield (words, width)
    for _ in range(layers):
        yield from ((width,), (3 * width, width), (width, width), (width,))
        yield from ((4 * width, width), (width, 4 * width))
    yield (words, width)


@dataclass
class Figures:
    """Of one optimizer. Seconds and bytes."""

    update: float
    """From a device that rests until it rests again, median."""
    host: float
    """Until step() returns, median."""
    loop: float
    """One turn of work and step(), when many follow each other."""
    idle: int
    """Device bytes beside parameters and gradients, between updates."""
    peak: int
    """Most device bytes in an update, over those."""
    reserved: int | None
    """Most device bytes that the allocator held, all in all: also blocks that are free, which it
    keeps for each stream. None: this device does not tell."""
    digest: int


class Training:
    """Parameters with gradients that stay, and an optimizer that updates them."""

    def __init__(self, place: Place, total: float, dtype: torch.dtype) -> None:
        self.place = place
        generator = torch.Generator(device=place.device if not place.simulated else "cpu")
        generator.manual_seed(0)
        where = {"device": generator.device, "dtype": dtype, "generator": generator}
        self.params: list[torch.nn.Parameter] = []
        for shape in shapes(total):
            value, grad = (torch.randn(shape, **where).mul_(0.02) for _ in range(2))  # type: ignore[call-overload]
            param = torch.nn.Parameter(value.to(place.device))
            param.grad = grad.to(place.device)
            self.params.append(param)
        side = 256 if place.simulated else 8192
        self.work = torch.ones(side, side, device=place.device, dtype=torch.bfloat16)
        # Matrix products take a workspace once, of this process.
        self.busy()
        place.synchronize()
        self.base = place.allocated()
        """Bytes before there is an optimizer."""

    def busy(self) -> None:
        """Some of what forward and backward do: matrix products, for tens of milliseconds."""
        for _ in range(1 if self.place.simulated else 20):
            torch.mm(self.work, self.work)

    def measure(self, optimizer: Any) -> Figures:
        place, base = self.place, self.base
        idle = place.allocated() - base
        place.reset_peak()
        updates, hosts = [], []
        for _ in range(STEPS):
            start = perf_counter()
            optimizer.step()
            hosts.append(perf_counter() - start)
            place.synchronize()
            updates.append(perf_counter() - start)
        peak, reserved = place.peak() - base - idle, place.reserved_peak()
        loop = self.loop(optimizer.step)
        digest = self.digest(optimizer)
        return Figures(median(updates), median(hosts), loop, idle, peak, reserved, digest)

    def loop(self, step: Any) -> float:
        self.place.synchronize()
        start = perf_counter()
        for _ in range(STEPS):
            self.busy()
            step()
        self.place.synchronize()
        return (perf_counter() - start) / STEPS

    def digest(self, optimizer: Any) -> int:
        """Of the bits of all parameters and states, place by place."""
        total = 0
        for param in self.params:
            for tensor in (param.detach(), *optimizer.state[param].values()):
                total = (total * 31 + self._bits(tensor)) % (1 << 61)
        return total

    def _bits(self, tensor: torch.Tensor) -> int:
        words = tensor.to(self.place.device).flatten().view(torch.int16)
        odd = torch.arange(1, 1 + min(words.numel(), 1 << 22), device=words.device) * 2 + 1
        parts = torch.split(words, 1 << 22)
        return sum(
            int((part.long() * odd[: part.numel()]).sum()) * (i + 1) for i, part in enumerate(parts)
        )


def speed(place: Place, billions: str) -> None:
    total = float(billions) * 1e9 * (SIMULATED_SCALE if place.simulated else 1)
    dtype = fitting_dtype(place, total)
    if dtype is None:
        return
    numel = sum(torch.Size(shape).numel() for shape in shapes(total))
    row("parameters", f"{numel / 1e9:.4g} billion, {str(dtype).removeprefix('torch.')}")
    native, _ = measured(place, total, dtype, swap=False)
    swapped, report = measured(place, total, dtype, swap=True)
    row("parameters and states", "equal bits", native.digest == swapped.digest)
    tell_memory(native, swapped, report)
    tell_times(place, native, swapped, report)


def fitting_dtype(place: Place, total: float) -> torch.dtype | None:
    """fp32 where all fits, in memory and in time, or else bf16, or else nothing."""
    free, _ = place.free_and_total() if not place.simulated else (1 << 40, 0)
    host = available_host_bytes()
    for dtype in (torch.float32, torch.bfloat16):
        # Parameters, gradients and two states natively; the states on the host.
        needed = int(total * dtype.itemsize * 4 * 1.1) + (1 << 30)
        pinned = int(total * dtype.itemsize * 2 * 1.1)
        seconds = pinned / link_of(place).get("pin", float("inf"))
        if needed < free and pinned < 0.9 * host and seconds < place.left() / 3:
            return dtype
    row(
        "not run",
        f"it needs {format_bytes(needed)} on the device and {format_bytes(pinned)} on the host, "
        f"and {seconds:.0f} s to pin those; there are {format_bytes(free)}, {format_bytes(host)} "
        f"and {place.left():.0f} s for all",
        headline=True,
    )
    return None


def link_of(place: Place) -> dict[str, float]:
    """What the section ``link`` measured; empty if it has not run."""
    file = place.out / "link.json"
    found: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return found


def measured(place: Place, total: float, dtype: torch.dtype, *, swap: bool) -> tuple[Figures, Any]:
    training = Training(place, total, dtype)
    optimizer: Any = torch.optim.AdamW(training.params, lr=1e-3, fused=True)
    if swap:
        started, before = perf_counter(), place.pinned()
        swap_optimizer(optimizer, SwapOptimizerConfig())
        optimizer.step()
        place.synchronize()
        row("wrapping and first step", f"{perf_counter() - started:.2f} s (pins host memory)")
        first = place.pinned()
        warm_up(place, optimizer)
        tell_pinned(before, first, place.pinned(), optimizer)
    else:
        optimizer.step()
        warm_up(place, optimizer)
    figures = training.measure(optimizer)
    report = optimizer.swap_report() if swap else None
    if swap and report is not None:
        counts = (report.ledger.plans_built, report.ledger.updates)
        row("plans built, updates", f"{counts[0]}, {counts[1]}", counts[0] == 1)
    place.check_races("the updates")
    del training, optimizer
    gc.collect()
    place.empty_cache()
    return figures, report


def warm_up(place: Place, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.step()
    place.synchronize()


Pinned: TypeAlias = "tuple[int, int] | None"


def tell_pinned(before: Pinned, first: Pinned, later: Pinned, optimizer: Any) -> None:
    """Before there were states, after the first step, and two steps later."""
    if before is None or first is None or later is None:
        row("pinned bytes", "this device does not tell")
        return
    state, taken = optimizer.swap_report().swapped_bytes, first[0] - before[0]
    row("pinned / state bytes", f"{taken / state:.3f}", taken <= 1.02 * state + (1 << 20))
    row("pinned memory taken in a steady step", later[1] - first[1], later == first)


def tell_memory(native: Figures, swapped: Figures, report: Any) -> None:
    row("states natively", format_bytes(native.idle))
    # What stays has fewer than min_numel elements; a counter takes 512 bytes.
    small = report.resident_bytes + 1024 * len(report.states)
    row("idle, swapped", format_bytes(swapped.idle), swapped.idle <= small, headline=True)
    arenas = report.peak_device_bytes
    within = swapped.peak <= arenas + (64 << 20)
    row("peak in an update", format_bytes(swapped.peak), within, headline=True)
    if native.reserved is not None and swapped.reserved is not None:
        row("reserved by the allocator at most, natively", format_bytes(native.reserved))
        row("reserved by the allocator at most, swapped", format_bytes(swapped.reserved))
    share = 100 * arenas / max(1, report.swapped_bytes)
    row("arenas", f"{format_bytes(arenas)}, {share:.1f} % of the states")
    row("host memory", format_bytes(report.host_bytes))


def tell_times(place: Place, native: Figures, swapped: Figures, report: Any) -> None:
    row("update natively", f"{1e3 * native.update:.2f} ms")
    row("update swapped", f"{1e3 * swapped.update:.2f} ms", headline=True)
    row("exposed in a loop with work", f"{1e3 * (swapped.loop - native.loop):.2f} ms per step")
    row("step() returns after, native", f"{1e3 * native.host:.2f} ms")
    row("step() returns after, swapped", f"{1e3 * swapped.host:.2f} ms")
    times = report.last_step
    parts = {"load": times.load, "update": times.update, "store": times.store, "wait": times.wait}
    row("by events", ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in parts.items()))
    link = link_of(place)
    if not link:
        row("of the link's speed", "the section link has not run")
        return
    nbytes = sum(report.batch_bytes)
    floor = max(nbytes / link["in_of_both"], nbytes / link["out_of_both"])
    row("bytes each way", format_bytes(nbytes))
    row("floor of this link", f"{1e3 * floor:.2f} ms")
    row("of the link's speed", f"{100 * floor / swapped.update:.0f} %", headline=True)


if __name__ == "__main__":
    main({"speed": speed})
