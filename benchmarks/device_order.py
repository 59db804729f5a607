# SPDX-License-Identifier: Apache-2.0
"""The sections of a device check about the order of streams, failures, and traces."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from device_common import Place, main, row
from torch.profiler import profile

from swap_core import SwapOptimizerConfig, TraceLane, read_trace
from swap_testkit.torch import assert_same_bits
from swap_torch import swap_optimizer

# The order of streams.


def order(place: Place) -> None:
    """Random work around updates, which shows memory that is used too early or too late."""
    seeds = range(4 if place.simulated else 40)
    for packed in (True, False):
        for seed in seeds:
            Scramble(place, packed, seed).run()
        row(
            f"random work around updates, {'packed' if packed else 'per tensor'}",
            f"{len(seeds)} runs",
            True,
        )
    on_side_stream(place)
    if place.kind == "cuda":
        without_host_waits(place)
    place.check_races("random work")


def twins(place: Place, packed: bool, numels: Sequence[int], **options: Any) -> list[Any]:
    optimizers: list[Any] = []
    for swapped in (False, True):
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(numel, generator=generator).to(place.device) for numel in numels]
        optimizer = torch.optim.AdamW([torch.nn.Parameter(v) for v in values], lr=0.01, **options)
        if swapped:
            config = SwapOptimizerConfig(swap_times=5, min_numel=16, packed_swap=packed)
            swap_optimizer(optimizer, config)
        optimizers.append(optimizer)
    return optimizers


class Scramble:
    """A native optimizer and its twin, among allocations, other streams, and reads of states."""

    def __init__(self, place: Place, packed: bool, seed: int) -> None:
        self.place = place
        self.random = random.Random(seed)
        numels = [self.random.randint(1, 20_000) for _ in range(12)]
        kinds: list[dict[str, Any]] = [{"fused": True}, {"foreach": None}, {"foreach": False}]
        kind = self.random.choice(kinds)
        self.native, self.swapped = twins(place, packed, numels, **kind)
        self.kept: list[torch.Tensor] = []

    def run(self) -> None:
        for step in range(4):
            for optimizer in (self.native, self.swapped):
                for number, param in enumerate(optimizer.param_groups[0]["params"]):
                    generator = torch.Generator().manual_seed(100 * step + number)
                    param.grad = torch.randn(param.shape, generator=generator).to(self.place.device)
            self.native.step()
            self.swapped.step()
            self.random.choice([self.spoil, self.look, self.save, self.place.empty_cache])()
        assert_same_bits(self.native, self.swapped)

    def spoil(self) -> None:
        """Take freed memory and fill it at once: whoever still reads it gets NaN."""
        sizes = [self.random.randint(1, 40_000) for _ in range(6)]
        self.kept = [torch.full((n,), float("nan"), device=self.place.device) for n in sizes]

    def look(self) -> None:
        for state in self.swapped.state.values():
            state["exp_avg"].sum()

    def save(self) -> None:
        self.kept = [state["exp_avg"] for state in self.swapped.state_dict()["state"].values()]


def on_side_stream(place: Place) -> None:
    native, swapped = twins(place, True, [3000] * 8, fused=True)
    side = torch.Stream(device=place.device)
    for _ in range(3):
        for optimizer in (native, swapped):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
        native.step()
        place.synchronize()
        with side:
            swapped.step()
        place.synchronize()
    assert_same_bits(native, swapped)
    row("updates on another stream than the default", "equal bits", True)


def without_host_waits(place: Place) -> None:
    """CUDA can raise wherever the host waits for the device."""
    _, swapped = twins(place, True, [3000] * 8, fused=True)
    for _ in range(2):
        for param in swapped.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        swapped.step()
    place.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            swapped.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row("a steady step never waits for the device", "3 steps", True)


# Failures.


def failures(place: Place) -> None:
    """No device memory for an arena: named, nothing lost, and the next update works."""
    numel = 20_000 if place.simulated else 20_000_000
    native, swapped = twins(place, True, [numel] * 10, fused=True)
    step_both(native, swapped)
    place.synchronize()
    with little_memory(place, swapped.swap_report().batch_bytes[0]):
        try:
            swapped.step()
        except torch.OutOfMemoryError as error:
            row("out of memory", str(error)[:90], "swap_times" in str(error))
        else:
            row("out of memory", "did not come", False)
    step_both(native, swapped)
    assert_same_bits(native, swapped)
    row("after it", "equal bits", True, headline=True)
    row(
        "held after it",
        swapped.swap_report().idle_device_bytes,
        swapped.swap_report().idle_device_bytes == 0,
    )


def step_both(native: Any, swapped: Any) -> None:
    for optimizer in (native, swapped):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()


@contextmanager
def little_memory(place: Place, nbytes: int) -> Iterator[None]:
    """Leave less than ``nbytes`` of device memory."""
    gc.collect()
    place.empty_cache()
    if place.simulated:
        from swap_testkit.torch import simulator

        simulator.set_memory_limit(place.allocated() + nbytes // 2)
        yield
        simulator.set_memory_limit(None)
        return
    taken: list[torch.Tensor] = []
    block = nbytes // 4
    try:
        while True:
            taken.append(torch.empty(block, dtype=torch.uint8, device=place.device))
            free, _ = place.free_and_total()
            if free > 64 * block:
                taken.append(torch.empty(free - 32 * block, dtype=torch.uint8, device=place.device))
    except torch.OutOfMemoryError:
        yield
    finally:
        taken.clear()
        place.empty_cache()


# Traces.


def trace(place: Place) -> None:
    numel = 20_000 if place.simulated else 4_000_000
    native, swapped = twins(place, True, [numel] * 20, fused=True)
    step_both(native, swapped)
    file = place.out / "trace.json"
    with swapped.trace(file):
        step_both(native, swapped)
        step_both(native, swapped)
    assert_same_bits(native, swapped)
    spans = read_trace(file)
    lanes = Counter(span.lane for span in spans)
    row(
        "spans",
        ", ".join(f"{lane.value} {lanes[lane]}" for lane in TraceLane),
        lanes[TraceLane.LOAD] == lanes[TraceLane.STORE] == 10,
    )
    row("no span ends before it begins", len(spans), all(span.seconds >= 0 for span in spans))
    ends = {(s.update, s.name): s for s in spans}
    late = []
    for batch in range(5):
        kinds = [ends[2, f"{kind}[{batch}]"].end for kind in ("load", "update", "store")]
        late += [batch] if kinds != sorted(kinds) else []
    row("loads, updates, stores end in order", file, not late, headline=True)
    with profile() as profiler:
        step_both(native, swapped)
    seen = ranges_of_host(profiler.events())
    row("ranges that a profiler sees", seen, seen == 15)
    place.check_races("traced updates")


def ranges_of_host(events: Iterable[Any]) -> int:
    """Ranges that the host made; a profiler of a card shows each on the device too."""
    return sum(
        event.name.startswith("swap.") and event.device_type.name == "CPU" for event in events
    )


if __name__ == "__main__":
    main({"order": order, "failures": failures, "trace": trace})
