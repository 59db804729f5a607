# SPDX-License-Identifier: Apache-2.0
"""Run benchmarks by name; each prints its table, and writes JSON that says on what it ran.

    python benchmarks/run.py all --out build/bench            # some minutes
    python benchmarks/run.py link peers --out build/bench --quick

A benchmark that fails does not stop the others, and is seen in the exit code. The device of a
machine that has one is checked by ``benchmarks/device_check.sh``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Benchmark:
    """A program of this folder that takes ``--json FILE``."""

    file: str
    about: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """Further arguments for a short run, whose times say little."""


BENCHMARKS = {
    "host": Benchmark(
        "host_overhead.py", "what a step costs on the host", ("--only", "one-element"), ("--quick",)
    ),
    "link": Benchmark(
        "link.py", "schedules over one link, in the model and simulated", (), ("--repeats", "1")
    ),
    "peers": Benchmark(
        "peers.py", "what else keeps states off the device", (), ("--tensors", "4", "--steps", "3")
    ),
    "checkpoint": Benchmark(
        "checkpoint_cost.py", "what state dicts cost", (), ("--count", "8", "--repeats", "2")
    ),
    "scale": Benchmark("scale.py", "forecasts for large models"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    told = "; ".join(f"{name}: {each.about}" for name, each in BENCHMARKS.items())
    parser.add_argument("names", nargs="+", choices=("all", *BENCHMARKS), metavar="NAME", help=told)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the JSON files")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in BENCHMARKS if "all" in args.names else dict.fromkeys(args.names):
        each = BENCHMARKS[name]
        command = [sys.executable, str(HERE / each.file), *each.arguments]
        command += [*(each.quick if args.quick else ()), "--json", str(args.out / f"{name}.json")]
        started = monotonic()
        print(f"\n## {name}: {each.about}\n", flush=True)
        code = subprocess.run(command, check=False).returncode
        print(f"{name}: exit code {code} after {monotonic() - started:.0f} s", flush=True)
        failed += [name] if code else []
    print(f"written to {args.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
