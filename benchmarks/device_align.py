# SPDX-License-Identifier: Apache-2.0
"""The sections of a device check that train scenarios natively and swapped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
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
RANKS_SECONDS = 60.0
"""After so long a training on several processes is ended."""


class Verdict(Enum):
    """What became of a scenario, in words."""

    ALIGNED = ""
    DIFFERS = "not aligned: "
    UNJUDGED = "not judged: "
    """It can be trained, but native trainings do not agree among themselves."""
    IMPOSSIBLE = "not on one process, also natively: "


def align(place: Place) -> None:
    """Every scenario on this one card, natively and swapped, as a world of one."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    deterministic()
    verdicts: Counter[Verdict] = Counter()
    late: list[str] = []
    longest = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(place.asked, f"file://{folder}/group", 90),
    ):
        # Those that need no other process show most here.
        for scenario in sorted(SCENARIOS.values(), key=lambda each: 1 not in each.worlds):
            if place.left() < 5 + 2 * longest:
                late.append(scenario.name)
                continue
            started = perf_counter()
            verdict, told = judged(place, scenario)
            row(scenario.name, f"{verdict.value}{told}", passed(verdict, scenario))
            verdicts[verdict] += 1
            longest = max(longest, perf_counter() - started)
        # Before the group is left, which may take long.
        tell(verdicts, late)


def passed(verdict: Verdict, scenario: Scenario) -> bool | None:
    """None: nothing is expected, but it is counted."""
    if verdict is Verdict.IMPOSSIBLE:
        return False if 1 in scenario.worlds else None
    return {Verdict.ALIGNED: True, Verdict.DIFFERS: False}.get(verdict)


def tell(verdicts: Counter[Verdict], late: Sequence[str]) -> None:
    aligned = verdicts[Verdict.ALIGNED]
    total = aligned + verdicts[Verdict.DIFFERS]
    others = ((Verdict.UNJUDGED, "not judged"), (Verdict.IMPOSSIBLE, "not on one process"))
    counts = ", ".join(f"{verdicts[key]} {words}" for key, words in others if verdicts[key])
    value = "; ".join(filter(None, [f"{aligned} of {total}", counts]))
    row("scenarios aligned", value, aligned == total > 0, headline=True)
    if late:
        row("not done for lack of time", f"{len(late)}: {', '.join(late)}", ok=False, headline=True)


def deterministic() -> None:
    """Choose deterministic algorithms, where there are any, for all trainings of this process."""
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def optimizers_of(place: Place, scenario: Scenario) -> Sequence[str]:
    """All of the scenarios for one process, two of the others; in a rehearsal one."""
    if 1 in scenario.worlds and not place.simulated:
        return list(scenario.optimizers)
    chosen = [name for name in ("adamw-fused", "adamw") if name in scenario.optimizers]
    return chosen[:1] if place.simulated else chosen


def judged(place: Place, scenario: Scenario) -> tuple[Verdict, str]:
    problem = native_problem(place, scenario)
    if problem is not None:
        return problem
    optimizers = optimizers_of(place, scenario)
    count, bad = compared(place, scenario, optimizers)
    if bad:
        return Verdict.DIFFERS, bad
    return Verdict.ALIGNED, f"equal bits, {count} swapped and {len(optimizers)} native trainings"


def native_problem(place: Place, scenario: Scenario) -> tuple[Verdict, str] | None:
    """Why a scenario cannot be judged here, for reasons that are native; None if it can."""
    make = OPTIMIZERS[scenario.optimizers[0]]
    try:
        runs = [record_run(scenario.build(this_place(place.asked), make), 2) for _ in range(2)]
    except Exception as error:  # noqa: BLE001  # whatever it is, swapping is not its reason
        return Verdict.IMPOSSIBLE, f"{type(error).__name__} {error}"[:80].strip()
    differ = compare_runs(runs[0], runs[1], Tolerance(), 0)
    return (Verdict.UNJUDGED, f"two native trainings: {differ[0]}"[:200]) if differ else None


def compared(place: Place, scenario: Scenario, optimizers: Sequence[str]) -> tuple[int, str]:
    """How many swapped trainings there were, and in what they differ from native ones."""
    steps = max(3, scenario.least_steps)
    configs = scenario.varied(CONFIGS)
    try:
        outcomes = scenario_on_rank(scenario.name, optimizers, place.asked, steps, configs)
    except Exception as error:  # noqa: BLE001  # natively it could be trained
        return 0, f"{type(error).__name__} {error}"[:300]
    wrong = [mismatch for outcome in outcomes for mismatch in outcome.mismatches]
    return len(outcomes), "; ".join(map(str, wrong[:3]))


# Several processes.


def ranks(place: Place) -> None:
    """Two processes: on two cards, or over gloo on one, as far as gloo takes its tensors."""
    cards = torch.accelerator.device_count()
    names = list(SCENARIOS) if cards > 1 and not place.simulated else ["ddp", "fsdp"]
    names = ["ddp"] if place.simulated else names
    aligned, total, longest = 0, 0, 0.0
    late: list[str] = []
    for name in names:
        if 2 not in SCENARIOS[name].worlds:
            continue
        if place.left() < 10 + longest:
            late.append(name)
            continue
        started = perf_counter()
        told = in_two_processes(place, name, cards)
        row(name, told["told"], told["ok"])
        total += told["ok"] is not None
        aligned += told["ok"] is True
        longest = max(longest, perf_counter() - started)
    where = "two cards" if cards > 1 and not place.simulated else "one card over gloo"
    ok = aligned == total if total else None
    row(f"scenarios aligned on {where}", f"{aligned} of {total}", ok, headline=True)
    if late:
        # All of them on two cards take longer than this check.
        row("not done for lack of time", f"{len(late)}: {', '.join(late)}", headline=True)


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
            seconds = max(1.0, min(RANKS_SECONDS, place.left() - 5))
            texts = [process.communicate(timeout=seconds)[0] for process in processes]
        except subprocess.TimeoutExpired:
            # Less than it should have had says nothing.
            ok = None if seconds < RANKS_SECONDS else False
            return {"told": f"ended after {seconds:.0f} s", "ok": ok}
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
    deterministic()
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
        timeout=timedelta(seconds=20),
    )
    scenario = SCENARIOS[name]
    problem = native_problem(place, scenario)
    if problem is not None:
        told: dict[str, Any] = {"told": f"not natively either: {problem[1]}", "ok": None}
    else:
        _, bad = compared(place, scenario, optimizers_of(place, scenario)[:1])
        told = {"told": bad or "equal bits", "ok": not bad}
    print("#" + json.dumps(told), flush=True)
    # A group that failed cannot be left in order.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main({"align": align, "ranks": ranks, "one_rank": one_rank})
