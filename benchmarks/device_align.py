# SPDX-License-Identifier: Apache-2.0
"""The sections of a device check that train scenarios natively and swapped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from device_common import Place, main, row

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import compare_runs
from swap_testkit.array import Tolerance
from swap_testkit.torch.launch import process_group
from swap_testkit.torch.record import record_run
from swap_testkit.torch.run import scenario_on_rank, this_place
from swap_testkit.torch.scenarios import OPTIMIZERS, SCENARIOS, Scenario

CONFIGS = [
    SwapOptimizerConfig(swap_times=4, min_numel=16, packed_swap=packed) for packed in (True, False)
]
RANKS_SECONDS = 60
"""After so long no further training on several processes begins."""


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
    row("scenarios aligned", f"{aligned} of {total}", aligned == total > 0, headline=True)
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
    ok = aligned == total if total else None
    row(f"scenarios aligned on {where}", f"{aligned} of {total}", ok, headline=True)


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


if __name__ == "__main__":
    main({"align": align, "ranks": ranks, "one_rank": one_rank})
