# SPDX-License-Identifier: Apache-2.0
"""Run the sections of a device check, each in a process and a time of its own.

    benchmarks/device_check.sh --out build/device_check

A section that fails, or takes too long, does not stop the others, and is seen in the exit code.
What it found until then is kept: results are told, and written, as they are made. Needs only the
standard library; sections need torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from checkout import path_of_checkout

HERE = Path(__file__).resolve().parent
MINUTES = 7.25
"""Less than 8: finding a Python with torch takes time too."""
REHEARSAL_PATIENCE = 4
"""A rehearsal may take so many times as long: machines that test things are slow and shared."""
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
"""Without the first, matrix products of two native trainings may differ."""
DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All processes are on this machine, which may have no other network, or no name for itself."""
ROW = '@{"what":'
"""How a line of results begins."""
LATE = "no time was left"
ENDED = "ended after"
WIDTH = 43


@dataclass(frozen=True)
class Section:
    """A part of the check."""

    name: str
    file: str
    least: float
    """Seconds that are kept for it, whatever those before it take."""
    most: float
    """It is ended after so many."""
    arguments: tuple[str, ...] = ()
    rehearsed: bool = True
    """Also on the simulated accelerator."""

    @property
    def title(self) -> str:
        return " ".join([self.name, *self.arguments])


# What matters most comes first. The least of all together is less than MINUTES.
SECTIONS = (
    Section("environment", "device_environment.py", 20, 45),
    Section("link", "device_environment.py", 20, 45),
    Section("align", "device_align.py", 90, 150),
    Section("speed", "device_speed.py", 25, 60, ("0.1",)),
    Section("order", "device_order.py", 35, 80),
    Section("failures", "device_order.py", 20, 45),
    Section("speed", "device_speed.py", 35, 80, ("1",), rehearsed=False),
    Section("speed", "device_speed.py", 70, 130, ("4",), rehearsed=False),
    Section("trace", "device_order.py", 20, 45),
    Section("ranks", "device_align.py", 40, 90),
    Section("peers", "device_peers.py", 45, 120),
)


def limit(section: Section, later: Sequence[Section], left: float) -> float:
    """Seconds for a section: what those after it need is kept for them."""
    kept = sum(each.least for each in later)
    return min(section.most, max(section.least, left - kept), left)


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

    @property
    def late(self) -> bool:
        """Whether it had too little time, by its own words or those of this file."""
        own = any("lack of time" in row["what"] for row in self.rows)
        return own or self.problem == LATE or self.problem.startswith(ENDED)


Told: TypeAlias = Callable[[Outcome], None]
"""Is called whenever a section has found something."""


def run(
    section: Section,
    seconds: float,
    environment: dict[str, str],
    out: Path,
    device: str,
    told: Told,
) -> Outcome:
    log = out / f"{section.title.replace(' ', '_')}.log"
    started = monotonic()
    command = [sys.executable, str(HERE / section.file), *section.title.split()]
    command += ["--device", device, "--out", str(out), "--until", f"{started + seconds:.1f}"]
    outcome = Outcome(section.title, problem="still running")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = followed(process, started + seconds, log, outcome, told)
        finally:
            # Its ranks and peers too: they are all in its session.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outcome.seconds = monotonic() - started
    outcome.rows = rows_of(log)
    if code is None:
        outcome.problem = f"{ENDED} {seconds:.0f} s, {len(outcome.rows)} results until then"
    else:
        outcome.problem = f"exit code {code}, see {log}" if code else ""
    return outcome


def followed(
    process: subprocess.Popen[bytes], deadline: float, log: Path, outcome: Outcome, told: Told
) -> int | None:
    """Wait, and tell what the section writes meanwhile. None: it runs longer than it may."""
    while monotonic() < deadline:
        try:
            return process.wait(min(0.5, max(0.01, deadline - monotonic())))
        except subprocess.TimeoutExpired:
            rows = rows_of(log)
            if len(rows) > len(outcome.rows):
                outcome.rows = rows
                told(outcome)
    return None


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Of whole lines; a warning without a line's end may stand before one."""
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    starts = [(line, line.find(ROW)) for line in lines if line.endswith("\n")]
    return [json.loads(line[start + 1 :]) for line, start in starts if start >= 0]


class Printer:
    """Prints what sections find as they find it."""

    def __init__(self) -> None:
        self.shown = 0

    def rows(self, outcome: Outcome) -> None:
        for row in outcome.rows[self.shown :]:
            mark = {True: "ok  ", False: "FAIL", None: "    "}[row["ok"]]
            print(f"  {mark} {row['what']:{WIDTH}}  {row['value']}")
        self.shown = len(outcome.rows)
        sys.stdout.flush()

    def end(self, outcome: Outcome) -> None:
        self.rows(outcome)
        verdict = "passed" if outcome.passed else f"FAILED {outcome.problem}".strip()
        print(f"{outcome.name}: {verdict} ({outcome.seconds:.0f} s)\n", flush=True)
        self.shown = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", help="cuda, another type, or sim (cuda)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="JSON and logs")
    parser.add_argument("--minutes", type=float, help=f"in all ({MINUTES}; sim: more)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="sections that begin so")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Section]:
    """The sections to run, with their times."""
    patience = REHEARSAL_PATIENCE if args.device == "sim" else 1
    return [
        replace(section, least=patience * section.least, most=patience * section.most)
        for section in SECTIONS
        if args.only is None or any(section.title.startswith(word) for word in args.only)
        if section.rehearsed or args.device != "sim"
    ]


def main() -> int:
    # Ended from outside: what was started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = path_of_checkout(out / "installed")
    environment = {**DEFAULTS, **os.environ, "PYTHONPATH": path, **SETTINGS}
    patience = 1
    if args.device == "sim":
        environment["OMP_NUM_THREADS"] = "1"
        patience = REHEARSAL_PATIENCE
    deadline = monotonic() + 60 * (args.minutes or MINUTES * patience)
    outcomes: list[Outcome] = []
    printer = Printer()
    sections = chosen(args)
    for number, section in enumerate(sections):
        seconds = limit(section, sections[number + 1 :], deadline - monotonic())

        def told(outcome: Outcome) -> None:
            printer.rows(outcome)
            write([*outcomes, outcome], args, out)

        if seconds < 5:
            outcome = Outcome(section.title, problem=LATE)
        else:
            outcome = run(section, seconds, environment, out, args.device, told)
        printer.end(outcome)
        outcomes.append(outcome)
        write(outcomes, args, out)
    return summary(outcomes, out)


def write(outcomes: list[Outcome], args: argparse.Namespace, out: Path) -> None:
    """Whenever something was found, so that nothing is lost if this is ended."""
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
    file = out / "device_check.json"
    # Never half of it, whenever this is ended.
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(file)


def summary(outcomes: list[Outcome], out: Path) -> int:
    print("\n| section | result | s | most important |\n| --- | --- | --- | --- |")
    for each in outcomes:
        told = "; ".join(f"{r['what']} {r['value']}" for r in each.rows if r.get("headline"))
        failed = [row["what"] for row in each.rows if row["ok"] is False]
        result = (
            "passed" if each.passed else "; ".join(filter(None, ["FAILED", each.problem, *failed]))
        )
        print(f"| {each.name} | {result} | {each.seconds:.0f} | {told} |")
    late = ", ".join(each.name for each in outcomes if each.late)
    if late:
        print(f"\nNot done, or not to the end, for lack of time: {late}.")
    seconds = sum(each.seconds for each in outcomes)
    print(f"\n{seconds:.0f} s; written: {out / 'device_check.json'}")
    if not outcomes:
        print("device_check: no section has such a name", file=sys.stderr)
        return 2
    return 0 if all(each.passed for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
