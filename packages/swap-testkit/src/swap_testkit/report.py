# SPDX-License-Identifier: Apache-2.0
"""Alignments as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from swap_core import format_bytes
from swap_testkit.alignment import Alignment

__all__ = ["alignment_table", "plot_alignments", "write_report"]


def alignment_table(alignments: Sequence[Alignment]) -> Table:
    """One row per training, and one for each of its variants that is not aligned."""
    table = Table(title="native against swapped")
    table.caption = (
        "states of the rank with most: natively on the device; swapped between updates, at most, "
        "and on the host"
    )
    table.add_column("training")
    table.add_column("aligned")
    for column in ("native", "idle", "peak", "host", "seconds"):
        table.add_column(column, justify="right")
    by_training: dict[str, list[Alignment]] = {}
    for alignment in alignments:
        by_training.setdefault(alignment.training, []).append(alignment)
    for training, variants in by_training.items():
        good = sum(variant.aligned for variant in variants)
        table.add_row(
            training,
            f"{good} of {len(variants)} ({variants[0].tolerance})",
            format_bytes(max(v.native_memory.idle for v in variants)),
            format_bytes(max(v.swapped_memory.idle for v in variants)),
            format_bytes(max(v.swapped_memory.peak for v in variants)),
            format_bytes(max(v.swapped_memory.host for v in variants)),
            f"{sum(v.seconds for v in variants):.1f}",
        )
        for variant in variants:
            if not variant.aligned:
                table.add_row(f"  {variant.variant}", f"[red]{variant.mismatches[0]}[/red]")
    return table


def write_report(alignments: Sequence[Alignment], folder: Path) -> list[Path]:
    """Write ``alignment.json`` and ``alignment.png`` into ``folder``, which is made if missing.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            **_versions("torch", "mindspore", "swap-testkit"),
        },
        "alignments": [alignment.as_json() for alignment in alignments],
    }
    text = folder / "alignment.json"
    text.write_text(json.dumps(data, indent=1) + "\n")
    picture = folder / "alignment.png"
    plot_alignments(alignments, picture)
    return [text, picture]


def _versions(*distributions: str) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def plot_alignments(alignments: Sequence[Alignment], file: Path) -> None:
    """Draw the loss difference per step, and the bytes of states on the device."""
    # Imported here: it takes half a second that a command line without a picture need not wait.
    from matplotlib.figure import Figure

    height = 2.2 + 0.28 * len(alignments)
    figure = Figure(figsize=(11, max(4.0, height)), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(1, 1.4))
    for alignment in alignments:
        differences = [abs(swapped - native) for native, swapped in alignment.losses]
        losses.plot(range(len(differences)), differences, marker=".", label=alignment.title)
    losses.set(title="loss, |swapped - native|", xlabel="step", ylabel="difference")
    if all(swapped == native for a in alignments for native, swapped in a.losses):
        losses.set_ylim(-1, 1)
        losses.text(0.5, 0.6, "equal in every step", transform=losses.transAxes, ha="center")
    elif len(alignments) <= 8:
        losses.legend(fontsize="small")
    rows = range(len(alignments))
    mib = 1 / 2**20
    native = [a.native_memory.idle * mib for a in alignments]
    peak = [a.swapped_memory.peak * mib for a in alignments]
    idle = [a.swapped_memory.idle * mib for a in alignments]
    memory.barh([row - 0.27 for row in rows], native, 0.25, label="native, always")
    memory.barh(list(rows), peak, 0.25, label="swapped, peak in the update")
    memory.barh([row + 0.27 for row in rows], idle, 0.25, label="swapped, between updates")
    memory.set_yticks(list(rows), [a.title for a in alignments], fontsize="small")
    memory.invert_yaxis()
    memory.set(title="optimizer states on the device", xlabel="MiB")
    memory.legend(fontsize="small")
    figure.savefig(file, dpi=120)
