# SPDX-License-Identifier: Apache-2.0
"""Train a scenario natively and swapped, resume each from each, and compare every bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeAlias

from _processes import TrainingFailedError, train
from _scenarios import SWAP_TIMES, Scenario
from _trace import read_traces

TORCHTITANS_OWN = ("native", "native-from-native")
SWAPPED = ("swapped", "swapped-from-native", "native-from-swapped", "swapped-from-swapped")
TRAININGS = (*TORCHTITANS_OWN, *SWAPPED)
"""In this order: those that resume come after those that they resume from."""
STEPS = 6
BITS = ("loss", "grad_norm", "parameters", "states", "metrics")

Traces: TypeAlias = list[list[dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario."""

    differences: tuple[str, ...] = ()
    native_error: str | None = None
    """What torchtitan itself says, where it does not train so."""
    swapped_error: str | None = None

    @property
    def same(self) -> bool:
        """Whether all of it ran, with the same bits."""
        return not (self.differences or self.native_error or self.swapped_error)


def check(
    scenarios: Sequence[Scenario], device: str, assets: Path, folder: Path
) -> dict[Scenario, Outcome]:
    """Run scenarios of one number of processes, six trainings each, in the same processes.

    Where one fails, those after it run in new ones.
    """
    outcomes: dict[Scenario, Outcome] = {}
    folder = folder / device
    waiting = list(scenarios)
    while waiting:
        (nproc,) = {scenario.nproc for scenario in waiting}
        trainings = [
            _prepare(scenario, name, folder / scenario.key)
            for scenario in waiting
            for name in TRAININGS
        ]
        logs = folder / f"from {waiting[0].key}"
        try:
            train(trainings, device=device, nproc=nproc, assets=assets, logs=logs)
        except TrainingFailedError as error:
            outcomes |= _outcomes(waiting, folder, error)
        else:
            outcomes |= _outcomes(waiting, folder, None)
        waiting = [scenario for scenario in waiting if scenario not in outcomes]
        for scenario in waiting:
            rmtree(folder / scenario.key)
    return outcomes


def _outcomes(
    scenarios: Sequence[Scenario], folder: Path, error: TrainingFailedError | None
) -> dict[Scenario, Outcome]:
    """Judge those that ran, up to the one that failed."""
    outcomes = {}
    for scenario in scenarios:
        path = folder / scenario.key
        failed = next((name for name in TRAININGS if not _is_complete(path / name)), None)
        if failed is None:
            outcomes[scenario] = Outcome(differences=tuple(_differences(scenario, path)))
            continue
        told = f"{failed}: {error or 'it left no trace'}"
        by_itself = failed in TORCHTITANS_OWN
        outcomes[scenario] = (
            Outcome(native_error=told) if by_itself else Outcome(swapped_error=told)
        )
        return outcomes
    if error is not None:  # after the last training, such as a race on the simulated accelerator
        outcomes[scenarios[-1]] = Outcome(swapped_error=str(error))
    return outcomes


def _prepare(scenario: Scenario, name: str, folder: Path) -> list[str]:
    """The arguments of the training ``kind`` or ``kind-from-written``."""
    kind, _, written = name.partition("-from-")
    if not written:
        return _arguments(scenario, kind, folder / name, scenario.arguments)
    # It goes on from the checkpoint that the other one will have written by then.
    (folder / name / "checkpoint").mkdir(parents=True)
    (folder / name / "checkpoint" / "step-3").symlink_to(folder / written / "checkpoint" / "step-3")
    more = scenario.arguments if scenario.resume_arguments is None else scenario.resume_arguments
    return _arguments(scenario, kind, folder / name, (*more, "--checkpoint.load-only"))


def _is_complete(folder: Path) -> bool:
    traces = read_traces(folder)
    return bool(traces) and all(rank and rank[-1]["step"] == STEPS for rank in traces)


def _arguments(scenario: Scenario, kind: str, folder: Path, more: tuple[str, ...]) -> list[str]:
    if kind == "native":
        chosen = ["--module", "titan_configs", "--config", scenario.config]
    else:
        chosen = ["--module", "swap_torch.integrations.torchtitan"]
        chosen += ["--config", f"titan_configs.{scenario.config}", "--optimizer.swap-optimizer"]
        chosen += ["--optimizer.swap-optimizer-times", SWAP_TIMES]
        chosen += scenario.swap_arguments
    return [*chosen, "--dump-folder", str(folder), "--checkpoint.enable", *more]


def _differences(scenario: Scenario, folder: Path) -> list[str]:
    traces = {name: read_traces(folder / name) for name in TRAININGS}
    found = []
    for name in TRAININGS:
        kind, _, written = name.partition("-from-")
        # With another parallelism, only those that resume compare with each other.
        other = written and scenario.resume_arguments is not None
        expected = traces["native-from-native" if other else "native"]
        found += _compare(expected, traces[name], name, first=4 if written else 1)
        found += _check_kind(traces[name], name, swapped=kind == "swapped")
    return found


def _compare(expected: Traces, found: Traces, name: str, *, first: int) -> list[str]:
    """Compare from step ``first`` on, on all ranks."""
    differences = []
    if len(found) != len(expected):
        return [f"{name}: {len(found)} ranks, expected {len(expected)}"]
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        steps = {line["step"]: line for line in ours}
        if sorted(steps) != list(range(first, STEPS + 1)):
            differences.append(f"{name}, rank {rank}: steps {sorted(steps)}")
            continue
        for line in theirs:
            if line["step"] < first:
                continue
            for bits in BITS:
                if steps[line["step"]][bits] != line[bits]:
                    differences.append(f"{name}, rank {rank}, step {line['step']}: {bits} differ")
    return differences


def _check_kind(traces: Traces, name: str, *, swapped: bool) -> list[str]:
    """A training in which nothing swaps would agree just as well."""
    lines = [line for rank in traces for line in rank]
    wrong = [
        line
        for line in lines
        if set(line["swapped"]) != {swapped} or (line["host_bytes"] > 0) != swapped
    ]
    return [f"{name}: expected swapped={swapped}, but {wrong[0]}"] if wrong else []
