# SPDX-License-Identifier: Apache-2.0
"""The command line: ``align``, ``worker``, ``cards``, ``scenarios``, ``simulator``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Alignment
from swap_testkit.array import Tolerance
from swap_testkit.report import alignment_table, write_report
from swap_testkit.simulator_cli import add_simulator

__all__ = ["main"]

_Job: TypeAlias = tuple[str, Callable[[], Sequence[Alignment]]]
"""A call of the kit, with a name for the progress bar."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 if everything is aligned, 1 if not, 2 for a bad argument."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"swap_testkit: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swap_testkit",
        description="Train natively and swapped, and compare bit by bit.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_align(commands.add_parser("align", help="compare a model of yours, or scenarios"))
    _add_worker(commands.add_parser("worker", help="one rank of a scenario, under torchrun"))
    _add_cards(
        commands.add_parser("cards", help="all scenarios on the accelerators of this machine")
    )
    add_simulator(commands.add_parser("simulator", help="the simulated accelerator"))
    listing = commands.add_parser("scenarios", help="list the scenarios")
    listing.add_argument("--framework", default="torch", choices=("torch", "mindspore"))
    listing.set_defaults(run=_list)
    return parser


def _add_align(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--builder", metavar="MODULE:FUNCTION", help="a function from a seed to a Job"
    )
    what.add_argument(
        "--scenario", metavar="NAME", nargs="+", help="ready-made trainings, or 'all'"
    )
    _add_common(parser)
    parser.add_argument(
        "--framework",
        default="torch",
        choices=("torch", "mindspore"),
        help="of the builder or the scenarios (default torch)",
    )
    parser.add_argument("--seed", type=int, default=0, help="for the builder (default 0)")
    parser.add_argument(
        "--parallel",
        default="none",
        choices=("none", "ddp", "fsdp", "hsdp"),
        help="how to make the builder's model parallel (default none)",
    )
    parser.add_argument(
        "--nproc", type=int, nargs="+", help="processes (default 1; scenarios: what each supports)"
    )
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default 0)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default 0)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write JSON and a plot there")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one training")
    parser.set_defaults(run=_align)


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", metavar="NAME", required=True)
    _add_common(parser)
    parser.set_defaults(run=_work, framework="torch")


def _add_cards(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write JSON and a plot there")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one training")
    parser.add_argument(
        "--allow-no-cards", action="store_true", help="succeed on a machine without accelerators"
    )
    parser.add_argument(
        "--framework", default="torch", choices=("torch", "mindspore"), help="(default torch)"
    )
    parser.set_defaults(run=_cards, scenario=["all"], nproc=None, builder=None, parallel="none")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=8, help="training steps (default 8)")
    parser.add_argument("--swap-times", type=int, default=16, help="batches (default 16)")
    parser.add_argument("--min-numel", type=int, default=1024, help="smaller states stay")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--packed", action="store_true", help="only packed (default: both)")
    how.add_argument("--per-tensor", action="store_true", help="only per tensor")
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu, sim (the simulated accelerator), or an accelerator's type",
    )
    parser.add_argument(
        "--optimizer", nargs="+", help="for scenarios (default: all that are there)"
    )


def _configs(options: argparse.Namespace) -> list[SwapOptimizerConfig]:
    # MindSpore's optimizers have different ways; None stands for all that one has.
    both = [None] if options.framework == "mindspore" else [True, False]
    ways: Sequence[bool | None] = (
        [True] if options.packed else [False] if options.per_tensor else both
    )
    return [
        SwapOptimizerConfig(
            swap_times=options.swap_times, min_numel=options.min_numel, packed_swap=packed
        )
        for packed in ways
    ]


def _align(options: argparse.Namespace) -> int:
    return 0 if all(alignment.aligned for alignment in _aligned(options)) else 1


def _aligned(options: argparse.Namespace) -> list[Alignment]:
    """Run everything, and tell and write the results."""
    console = _console()
    jobs = list(_jobs(options))
    alignments: list[Alignment] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("align", total=len(jobs))
        for name, run in jobs:
            progress.update(task, description=name)
            for alignment in run():
                alignments.append(alignment)
                # A log has no progress bar, so it gets a line each.
                if not console.is_terminal or not alignment.aligned:
                    console.print(alignment.explain(), highlight=False, soft_wrap=True)
            progress.advance(task)
    console.print(alignment_table(alignments))
    if options.report is not None:
        files = write_report(alignments, options.report)
        console.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
    return alignments


def _cards(options: argparse.Namespace) -> int:
    if options.framework == "mindspore":
        return _mindspore_cards(options)
    from swap_testkit.torch.run import present_cards

    options.device, count = present_cards()
    if count == 0:
        print(
            "swap_testkit cards: torch finds no accelerator here, so nothing was run. Give "
            "--allow-no-cards where that is all right."
        )
        return 0 if options.allow_no_cards else 1
    options.nproc = list(range(1, count + 1))
    return _align(options)


def _mindspore_cards(options: argparse.Namespace) -> int:
    """Every scenario on Ascend cards, and the RFC's rows with what became of them."""
    import mindspore

    on_cards = mindspore.get_context("device_target") == "Ascend"
    alignments: list[Alignment] = []
    if on_cards:
        options.device = "ascend"
        alignments = _aligned(options)
    else:
        print("swap_testkit cards: MindSpore has no Ascend card here, so nothing was run.")
    table = Table(title="rows of the RFC's section 7.2.2")
    for column in ("row", "on cards", "outcome"):
        table.add_column(column, overflow="fold")
    for name, what, outcome in _row_outcomes(alignments):
        table.add_row(name, what, outcome)
    _console().print(table)
    if not on_cards:
        return 0 if options.allow_no_cards else 1
    return 0 if all(alignment.aligned for alignment in alignments) else 1


def _row_outcomes(alignments: Sequence[Alignment]) -> Iterator[tuple[str, str, str]]:
    from swap_testkit.mindspore.rows import RFC_ROWS

    for name, row in RFC_ROWS.items():
        found = [a for a in alignments if a.title.startswith(tuple(row.titles()))]
        aligned = sum(alignment.aligned for alignment in found)
        what = f"{', '.join(row.scenarios)} with {', '.join(row.optimizers)} on {row.nproc}"
        yield name, what, f"{aligned} of {len(found)} aligned" if found else "not run"


def _jobs(options: argparse.Namespace) -> Iterator[_Job]:
    if options.framework == "mindspore":
        return _mindspore_jobs(options)
    return _scenario_jobs(options) if options.scenario else _builder_jobs(options)


def _mindspore_jobs(options: argparse.Namespace) -> Iterator[_Job]:
    from swap_testkit.mindspore import align as mindspore

    common = {"steps": options.steps, "device": options.device}
    if options.parallel != "none" or (options.builder and options.nproc not in (None, [1])):
        raise ValueError(
            "--parallel, and --nproc with a builder, are for torch; leave them out with mindspore."
        )
    if options.builder:
        sys.path.insert(0, "")
        yield (
            options.builder,
            partial(
                mindspore.align_job,
                options.builder,
                configs=_configs(options),
                seed=options.seed,
                tolerance=Tolerance(options.rtol, options.atol),
                **common,
            ),
        )
        return
    (config,) = _configs(options)
    optimizers = mindspore.available_optimizers(options.optimizer)
    run = partial(mindspore.align_scenarios, optimizers=optimizers, config=config, **common)
    scenarios = mindspore.find_scenarios(options.scenario)
    if options.nproc and not any(set(options.nproc) & set(each.worlds) for each in scenarios):
        raise ValueError(f"none of these scenarios runs on {options.nproc} processes.")
    for nproc in sorted({world for scenario in scenarios for world in scenario.worlds}):
        if options.nproc and nproc not in options.nproc:
            continue
        names = [scenario.name for scenario in scenarios if nproc in scenario.worlds]
        if nproc == 1:
            for name in names:
                yield f"mindspore {name}", partial(run, [name])
        else:  # a launch takes long
            label = f"mindspore {', '.join(names)} on {nproc}"
            yield label, partial(run, names, nproc=nproc, timeout=options.timeout)


def _builder_jobs(options: argparse.Namespace) -> Iterator[_Job]:
    from swap_testkit.torch.parallel import Parallel
    from swap_testkit.torch.run import align_job

    # The current folder is where a user's module is, as with `python -m`.
    sys.path.insert(0, "")
    for nproc in options.nproc or [1]:
        yield (
            f"{options.builder} on {nproc}",
            partial(
                align_job,
                options.builder,
                steps=options.steps,
                configs=_configs(options),
                seed=options.seed,
                parallel=Parallel(options.parallel),
                nproc=nproc,
                device=options.device,
                tolerance=Tolerance(options.rtol, options.atol),
                timeout=options.timeout,
            ),
        )


def _scenario_jobs(options: argparse.Namespace) -> Iterator[_Job]:
    from swap_testkit.torch.run import align_scenario, available_optimizers, find_scenarios

    for scenario in find_scenarios(options.scenario):
        for nproc in scenario.worlds:
            if options.nproc and nproc not in options.nproc:
                continue
            yield (
                f"{scenario.name} on {nproc}",
                partial(
                    align_scenario,
                    scenario.name,
                    optimizers=available_optimizers(scenario, options.optimizer),
                    nproc=nproc,
                    configs=_configs(options),
                    steps=options.steps,
                    device=options.device,
                    timeout=options.timeout,
                ),
            )


def _work(options: argparse.Namespace) -> int:
    """Be one rank. Rank 0 tells the result; every rank returns it."""
    from swap_testkit.torch.run import work

    alignments = work(
        options.scenario,
        optimizers=options.optimizer,
        configs=_configs(options),
        steps=options.steps,
        device=options.device,
    )
    if os.environ.get("RANK", "0") == "0":
        _console().print(alignment_table(alignments))
    return 0 if all(alignment.aligned for alignment in alignments) else 1


def _list(options: argparse.Namespace) -> int:
    table = Table(title="scenarios")
    for column in ("name", "processes", "what"):
        table.add_column(column)
    for row in _scenario_rows(options.framework):
        table.add_row(*row)
    _console().print(table)
    return 0


def _scenario_rows(framework: str) -> list[tuple[str, str, str]]:
    if framework == "mindspore":
        from swap_testkit.mindspore.scenarios import SCENARIOS as MINDSPORE_SCENARIOS

        return [
            (s.name, ", ".join(map(str, s.worlds)), s.about) for s in MINDSPORE_SCENARIOS.values()
        ]
    from swap_testkit.torch.scenarios import SCENARIOS

    return [(s.name, ", ".join(map(str, s.worlds)), s.about) for s in SCENARIOS.values()]


def _console() -> Console:
    """The terminal; a log has no width of its own, and tables need one."""
    console = Console()
    return console if console.is_terminal else Console(width=110)
