# SPDX-License-Identifier: Apache-2.0
"""The command line: ``plan`` looks forward, before there is a card; ``trace`` looks back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from swap_core.plan_command import add_plan
from swap_core.trace_command import add_trace

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 2 for a bad argument."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"swap_core: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swap_core", description="Plan and watch the swapping of optimizer states."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_plan(
        commands.add_parser(
            "plan", help="forecast memory and time for a model and a card, on a virtual clock"
        )
    )
    add_trace(
        commands.add_parser("trace", help="tell, and draw, what a file of optimizer.trace() holds")
    )
    return parser
