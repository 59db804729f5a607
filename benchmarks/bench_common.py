# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine, tables, and files of results."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import swap_core
import swap_torch

__all__ = ["console", "machine", "table", "write_json"]


def console() -> Console:
    """The terminal; a log has no width of its own, and tables need one."""
    return Console(width=None if sys.stdout.isatty() else 140, soft_wrap=not sys.stdout.isatty())


def machine() -> dict[str, Any]:
    """Where and with what this runs, for a file of results."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "platform": platform.platform(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "accelerator": _accelerator_name(accelerator),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "swap-core": swap_core.__version__,
        "swap-torch": swap_torch.__version__,
        "date": date.today().isoformat(),
    }


def _accelerator_name(accelerator: torch.device | None) -> str | None:
    if accelerator is None:
        return None
    if accelerator.type == "cuda":
        return str(torch.cuda.get_device_name(0))
    return accelerator.type


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    drawn = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left")
    for row in rows:
        drawn.add_row(*map(str, row))
    return drawn


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Write results, with the machine they are from; ``None``: do not."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), **content}, indent=2) + "\n")
