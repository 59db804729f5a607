# SPDX-License-Identifier: Apache-2.0
"""Train every scenario on the torch that is installed, and record what came of it.

``python matrix.py --record`` writes the table into docs/coverage.md; with ``--scenario``, some rows
of it. Exits with 1 if swapping changed or broke anything that torchtitan does by itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _assets import make_assets
from _check import Outcome, check
from _scenarios import SCENARIOS, Scenario

PAGE = Path(__file__).parents[3] / "docs" / "coverage.md"
TABLE_HEAD = "| training | processes | native and swapped | run on |\n| --- | --- | --- | --- |"
DEVICES = {"cpu": "CPU", "sim": "simulated accelerator", "cuda": "CUDA"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", action="append", choices=DEVICES, help="default: all there are")
    parser.add_argument("--scenario", default="", help="only those with this in their name")
    parser.add_argument("--record", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    devices = options.device or [
        device for device in DEVICES if device != "cuda" or torch.cuda.is_available()
    ]
    scenarios = [scenario for scenario in SCENARIOS if options.scenario in scenario.name]
    good = True
    for device in devices:
        cells = {s.name: f"not run: needs {missing(s, device)}" for s in scenarios}
        for outcomes in run(device, scenarios):
            cells |= {scenario.name: cell(outcome) for scenario, outcome in outcomes.items()}
            good &= not any(each.differences or each.swapped_error for each in outcomes.values())
            if options.record:
                record(device, {scenario.name: cells[scenario.name] for scenario in outcomes})
        if options.record:
            record(device, cells)
    return 0 if good else 1


def run(device: str, scenarios: list[Scenario]) -> Iterator[dict[Scenario, Outcome]]:
    """Run those that can be run here, those of one number of processes after the other."""
    there = [scenario for scenario in scenarios if missing(scenario, device) is None]
    with tempfile.TemporaryDirectory(prefix="torchtitan-matrix-") as name:
        assets = make_assets(Path(name, "assets"))
        for nproc, group in groupby(sorted(there, key=processes), key=processes):
            found = check(list(group), device, assets, Path(name, str(nproc)))
            for scenario, outcome in found.items():
                print(f"{device}: {scenario.name}: {cell(outcome)}", flush=True)
            yield found


def missing(scenario: Scenario, device: str) -> str | None:
    """What a scenario needs that is not here, if anything."""
    if device not in scenario.devices:
        return "an accelerator"
    if device == "cuda" and torch.cuda.device_count() < scenario.nproc:
        return f"{scenario.nproc} cards"
    installed = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if installed < scenario.needs:
        return f"torch {'.'.join(map(str, scenario.needs))}"
    return None


def processes(scenario: Scenario) -> int:
    return scenario.nproc


def cell(outcome: Outcome) -> str:
    """What the table says."""
    if outcome.native_error is not None:
        return f"torchtitan itself fails: {first_line(outcome.native_error)}"
    if outcome.swapped_error is not None:
        return f"**swapped fails**: {first_line(outcome.swapped_error)}"
    if outcome.differences:
        return f"**differs**: {outcome.differences[0]}"
    return "same bits"


def first_line(error: str) -> str:
    line = error.splitlines()[0].replace("[rank0]: ", "").replace("[rank1]: ", "")
    return line.replace("|", "/")[:200]


def about(device: str) -> str:
    """On what the table of a device is made."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchtitan"))
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    return f"{DEVICES[device]}: {versions}, {machine}, {gpus()}."


def gpus() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def record(device: str, cells: dict[str, str]) -> None:
    """Replace the rows of these scenarios in the page, and keep the others if they fit."""
    begin, end = (f"<!-- matrix.py, {device}: {word} -->\n" for word in ("begin", "end"))
    before, found, rest = PAGE.read_text().partition(begin)
    there, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{PAGE} has no lines {begin!r} and {end!r}")
    head = about(device)
    # Rows of other versions or of another machine would be under the wrong heading.
    rows = rows_of(there) if head in there.splitlines() else {}
    today = date.today().isoformat()
    for scenario in SCENARIOS:
        if scenario.name in cells:
            # The name says the device, since the first cells of this page's tables all differ.
            row = [f"{scenario.name} ({device})", str(scenario.nproc), cells[scenario.name], today]
            rows[row[0]] = f"| {' | '.join(row)} |"
    names = [f"{scenario.name} ({device})" for scenario in SCENARIOS]
    table = [TABLE_HEAD, *(rows[name] for name in names if name in rows)]
    text = f"{head}\n\n" + "\n".join(table)
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def rows_of(text: str) -> dict[str, str]:
    """The rows of a table that :func:`record` wrote, by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}


if __name__ == "__main__":
    sys.exit(main())
