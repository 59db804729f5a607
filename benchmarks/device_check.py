# SPDX-License-Identifier: Apache-2.0
"""Run the sections of a device check, each in a process and a time of its own.

    benchmarks/device_check.sh --out build/device_check

A section that fails, or takes too long, does not stop the others, and is seen in the exit code.
What a section found until then is kept. Needs only the standard library; sections need torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from checkout import path_of_checkout

HERE = Path(__file__).resolve().parent
MINUTES = 7.5
REHEARSAL_PATIENCE = 4
"""A rehearsal may take so many times as long: machines that test things are slow and shared."""
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it matrix products of two native trainings may differ."""


@dataclass(frozen=True)
class Section:
    """A part of the check."""

    name: str
    file: str
    seconds: float
    """It is ended after so long."""
    arguments: tuple[str, ...] = ()
    rehearsed: bool = True
    """Also on the simulated accelerator."""


# What matters most comes first: whatever no time is left for is not run.
SECTIONS = (
    Section("environment", "device_environment.py", 45),
    Section("link", "device_environment.py", 45),
    Section("align", "device_align.py", 110),
    Section("speed", "device_speed.py", 60, ("0.1",)),
    Section("speed", "device_speed.py", 80, ("1",), rehearsed=False),
    Section("order", "device_order.py", 60),
    Section("failures", "device_order.py", 45),
    Section("trace", "device_order.py", 45),
    Section("speed", "device_speed.py", 130, ("4",), rehearsed=False),
    Section("ranks", "device_align.py", 90),
    Section("peers", "device_peers.py", 120),
)


@dataclass
class Outcome:
    """What became of a section."""

    name: str
    seconds: float = 0.0
    problem: str = ""
    """Why it did not pass; empty if it did."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """What it found: ``what``, ``value``, and ``ok``, which is None where nothing is expected."""

    @property
    def passed(self) -> bool:
        return not self.problem and all(row["ok"] is not False for row in self.rows)


def run(
    section: Section, seconds: float, environment: dict[str, str], out: Path, device: str
) -> Outcome:
    name = " ".join([section.name, *section.arguments])
    log = out / f"{name.replace(' ', '_')}.log"
    command = [sys.executable, str(HERE / section.file), section.name, *section.arguments]
    command += ["--device", device, "--out", str(out)]
    started, problem = monotonic(), ""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            problem = f"ended after {seconds:.0f} s"
        else:
            problem = f"exit code {code}, see {log}" if code else ""
        finally:
            # Its ranks and peers too: they are all in its session.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Outcome(name, monotonic() - started, problem, rows_of(log))


def rows_of(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line[1:]) for line in lines if line.startswith("@{")]


def show(outcome: Outcome) -> None:
    verdict = "passed" if outcome.passed else f"FAILED {outcome.problem}".strip()
    print(f"\n{outcome.name}: {verdict} ({outcome.seconds:.0f} s)")
    width = max((len(row["what"]) for row in outcome.rows), default=0)
    for row in outcome.rows:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[row["ok"]]
        print(f"  {mark} {row['what']:{width}}  {row['value']}")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", help="cuda, another type, or sim (cuda)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="JSON and logs")
    parser.add_argument("--minutes", type=float, help=f"in all ({MINUTES}; sim: more)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="sections that begin so")
    return parser.parse_args()


def main() -> int:
    # Ended from outside: what was started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": path_of_checkout(out / "installed"), **SETTINGS}
    patience = 1
    if args.device == "sim":
        environment["OMP_NUM_THREADS"] = "1"
        patience = REHEARSAL_PATIENCE
    deadline = monotonic() + 60 * (args.minutes or MINUTES * patience)
    outcomes: list[Outcome] = []
    for section in SECTIONS:
        name = " ".join([section.name, *section.arguments])
        if args.only and not any(name.startswith(word) for word in args.only):
            continue
        if args.device == "sim" and not section.rehearsed:
            continue
        left = deadline - monotonic()
        if left < 5:
            outcomes.append(Outcome(name, 0.0, "no time was left"))
        else:
            seconds = min(section.seconds * patience, left)
            outcomes.append(run(section, seconds, environment, out, args.device))
        show(outcomes[-1])
        write(outcomes, args, out)
    return summary(outcomes, out)


def write(outcomes: list[Outcome], args: argparse.Namespace, out: Path) -> None:
    """After each section, so that nothing is lost if this is ended."""
    sections = [
        {
            "name": o.name,
            "passed": o.passed,
            "problem": o.problem,
            "seconds": o.seconds,
            "rows": o.rows,
        }
        for o in outcomes
    ]
    content = {"device": args.device, "sections": sections}
    (out / "device_check.json").write_text(json.dumps(content, indent=2) + "\n")


def summary(outcomes: list[Outcome], out: Path) -> int:
    print("\n| section | result | s | most important |\n| --- | --- | --- | --- |")
    for each in outcomes:
        told = "; ".join(f"{r['what']} {r['value']}" for r in each.rows if r.get("headline"))
        failed = [row["what"] for row in each.rows if row["ok"] is False]
        result = (
            "passed" if each.passed else "; ".join(filter(None, ["FAILED", each.problem, *failed]))
        )
        print(f"| {each.name} | {result} | {each.seconds:.0f} | {told} |")
    seconds = sum(each.seconds for each in outcomes)
    print(f"\n{seconds:.0f} s; written: {out / 'device_check.json'}")
    if not outcomes:
        print("device_check: no section has such a name", file=sys.stderr)
        return 2
    return 0 if all(each.passed for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
