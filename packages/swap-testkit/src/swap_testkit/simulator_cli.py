# SPDX-License-Identifier: Apache-2.0
"""The commands ``simulator build|info|selftest``."""

from __future__ import annotations

import argparse

from rich.console import Console

__all__ = ["add_simulator"]


def add_simulator(parser: argparse.ArgumentParser) -> None:
    """Add the commands to a parser. torch is imported when one runs."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, what in (
        ("build", _build, "compile it now, and tell where it is"),
        ("info", _info, "tell compiler, cache, and whether it is compiled"),
        ("selftest", _selftest, "check that it works here"),
    ):
        commands.add_parser(name, help=what).set_defaults(run=run)


def _build(_: argparse.Namespace) -> int:
    from swap_testkit.torch.simulator.build import build

    print(build())
    return 0


def _info(_: argparse.Namespace) -> int:
    import torch

    from swap_testkit.torch.simulator.build import CACHE_VARIABLE, recipe

    how = recipe()
    print(f"torch     {torch.__version__}")
    print(f"compiler  {how.compiler}")
    print(f"library   {how.library}")
    print(f"compiled  {'yes' if how.is_built else 'no, on first use'}")
    print(f"The environment variable {CACHE_VARIABLE} names another folder for compiled code.")
    return 0


def _selftest(_: argparse.Namespace) -> int:
    from swap_testkit.torch.simulator.selftest import selftest

    console = Console(highlight=False, soft_wrap=True)
    code = 0
    for name, problem in selftest():
        console.print(f"{'ok    ' if problem is None else 'FAILED'}  {name}")
        if problem is not None:
            console.print(f"        {problem}", markup=False)
            code = 1
    return code
