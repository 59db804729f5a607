# SPDX-License-Identifier: Apache-2.0
"""The sections of a device check that ask whether it is right there, and what is there."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from device_common import Place, available_host_bytes, main, row
from torch.profiler import profile

import swap_core
import swap_torch
from swap_core import SwapOptimizerConfig, TraceLane, format_bytes, read_trace
from swap_testkit.alignment import compare_runs
from swap_testkit.array import Tolerance
from swap_testkit.torch import assert_same_bits
from swap_testkit.torch.launch import process_group
from swap_testkit.torch.record import record_run
from swap_testkit.torch.run import scenario_on_rank, this_place
from swap_testkit.torch.scenarios import OPTIMIZERS, SCENARIOS, Scenario
from swap_torch import swap_optimizer

CONFIGS = [
    SwapOptimizerConfig(swap_times=4, min_numel=16, packed_swap=packed) for packed in (True, False)
]


RANKS_SECONDS = 60
"""After so long no further training on several processes begins."""


# What is there.


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
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        return str(error)
    return (done.stdout or done.stderr).strip().replace("\n", ", ")


# The link.


def link(place: Place) -> None:
    """Both directions alone and together, for blocks of some sizes; and what pinning costs."""
    largest = 4 << 20 if place.simulated else 256 << 20
    start = perf_counter()
    hosts = [torch.empty(largest, dtype=torch.uint8, pin_memory=True).zero_() for _ in range(2)]
    seconds = perf_counter() - start
    row("pinning and clearing", f"{2 * largest / seconds / 1e9:.2f} GB/s")
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
    (place.out / "link.json").write_text(json.dumps(found))
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


# The scenarios.


def align(place: Place) -> None:
    """Every scenario on this one card, natively and swapped, as a world of one."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    aligned, total, impossible = 0, 0, []
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(place.asked, f"file://{folder}/group", 90),
    ):
        for scenario in SCENARIOS.values():
            problem = native_problem(place, scenario)
            if problem:
                impossible.append(f"{scenario.name} ({problem})")
                continue
            bad = misaligned(place, scenario, optimizers_of(place, scenario))
            total += 1
            aligned += not bad
            if bad:
                row(scenario.name, bad, False)
    row("scenarios aligned", f"{aligned} of {total}", aligned == total, headline=True)
    if impossible:
        row("not on one process, also natively", ", ".join(impossible))


def optimizers_of(place: Place, scenario: Scenario) -> Sequence[str]:
    """All of the scenarios for one process, two of the others; in a rehearsal one."""
    if 1 in scenario.worlds and not place.simulated:
        return list(scenario.optimizers)
    chosen = [name for name in ("adamw-fused", "adamw") if name in scenario.optimizers]
    return chosen[:1] if place.simulated else chosen


def native_problem(place: Place, scenario: Scenario) -> str:
    """Why a scenario cannot be judged here, for reasons that are native; empty if it can."""
    make = OPTIMIZERS[scenario.optimizers[0]]
    try:
        runs = [record_run(scenario.build(this_place(place.asked), make), 2) for _ in range(2)]
    except Exception as error:  # noqa: BLE001  # whatever it is, swapping is not its reason
        return f"{type(error).__name__} {error}"[:80]
    differ = compare_runs(runs[0], runs[1], Tolerance(), 0)
    return f"two native trainings differ: {differ[0]}"[:80] if differ else ""


def misaligned(place: Place, scenario: Scenario, optimizers: Sequence[str]) -> str:
    try:
        steps = max(3, scenario.least_steps)
        outcomes = scenario_on_rank(scenario.name, optimizers, place.asked, steps, CONFIGS)
    except Exception as error:  # noqa: BLE001  # natively it could be trained
        return f"{type(error).__name__} {error}"[:300]
    wrong = [mismatch for outcome in outcomes for mismatch in outcome.mismatches]
    return "; ".join(map(str, wrong[:3]))


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
    seen = sum(event.name.startswith("swap.") for event in profiler.events())
    row("ranges that a profiler sees", seen, seen == 15)
    place.check_races("traced updates")


# Several processes.


def ranks(place: Place) -> None:
    """Two processes: on two cards, or over gloo on one, as far as gloo takes its tensors."""
    cards = torch.accelerator.device_count()
    names = list(SCENARIOS) if cards > 1 and not place.simulated else ["ddp", "fsdp"]
    names = ["ddp"] if place.simulated else names
    aligned, total, started = 0, 0, perf_counter()
    for name in names:
        if 2 not in SCENARIOS[name].worlds:
            continue
        if perf_counter() - started > RANKS_SECONDS:
            row("not run for lack of time", name)
            continue
        told = in_two_processes(place, name, cards)
        row(name, told["told"], told["ok"])
        total += told["ok"] is not None
        aligned += told["ok"] is True
    where = "two cards" if cards > 1 and not place.simulated else "one card over gloo"
    row(f"scenarios aligned on {where}", f"{aligned} of {total}", aligned == total, headline=True)


def in_two_processes(place: Place, name: str, cards: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "one_rank",
                    name,
                    f"{folder}/group",
                    "--device",
                    place.asked,
                    "--out",
                    folder,
                ],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": str(rank if cards > 1 else 0),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            texts = [process.communicate(timeout=60)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return {"told": "ended after 60 s", "ok": False}
        finally:
            for process in processes:
                process.kill()
    lines = [line[1:] for text in texts for line in text.splitlines() if line.startswith("#{")]
    results = [json.loads(line) for line in lines]
    if len(results) < 2:
        return {"told": "a process died", "ok": False}
    return min(results, key=lambda each: {False: 0, None: 1, True: 2}[each["ok"]])


def one_rank(place: Place, name: str, group: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    cards = torch.accelerator.device_count()
    backend = f"cpu:gloo,{place.kind}:" + (
        dist.get_default_backend_for_device(place.kind) if cards > 1 else "gloo"
    )
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        backend,
        init_method=f"file://{group}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    scenario = SCENARIOS[name]
    problem = native_problem(place, scenario)
    if problem:
        told: dict[str, Any] = {"told": f"not natively either: {problem}", "ok": None}
    else:
        bad = misaligned(place, scenario, optimizers_of(place, scenario)[:1])
        told = {"told": bad or "equal bits", "ok": not bad}
    print("#" + json.dumps(told), flush=True)
    # A group that failed cannot be left in order.
    sys.stdout.flush()
    os._exit(0)


# Peers.


def peers(place: Place) -> None:
    import peers as cases

    millions = 1 if place.simulated else 200
    args = argparse.Namespace(
        device=place.asked, tensors=50, numel=20_000 * millions, steps=6, seconds=60.0,
        only=["torch AdamW, fused", "swap_torch, packed"] if place.simulated else None,
    )  # fmt: skip
    if place.simulated:
        args.tensors = 8
    for result in cases.run_all(args):
        told = next(iter(cases.rows([result])))
        ours = result["name"].startswith("swap_torch")
        ok = bool(result["runs"] and result["equal_bits"]) if ours else None
        labels = ("step ms", "idle MiB", "peak MiB", "host MiB", "against native")
        value = ", ".join(f"{k} {v}" for k, v in zip(labels, told[1:], strict=True) if v)
        row(told[0], value, ok, headline=ours)


if __name__ == "__main__":
    main(
        {
            "environment": environment,
            "link": link,
            "align": align,
            "order": order,
            "failures": failures,
            "trace": trace,
            "ranks": ranks,
            "one_rank": one_rank,
            "peers": peers,
        }
    )
