# SPDX-License-Identifier: Apache-2.0
"""The command ``trace``: what a trace holds, in numbers and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from swap_core.number import Number
from swap_core.picture import need_matplotlib, new_figure
from swap_core.report import format_bytes
from swap_core.trace import TraceLane, TraceSpan, read_trace

__all__ = ["add_trace"]

_DEVICE_LANES = [lane for lane in TraceLane if lane is not TraceLane.HOST]
_COLOURS = {
    TraceLane.LOAD: "tab:blue",
    TraceLane.UPDATE: "tab:green",
    TraceLane.STORE: "tab:orange",
    TraceLane.WAIT: "tab:red",
    TraceLane.HOST: "tab:gray",
}


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="of optimizer.trace(FILE)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--update", type=Number(1, 1e9), metavar="N", help="only this update, from 1"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.plot is not None:
        need_matplotlib()
    spans = read_trace(options.file)
    if options.update is not None:
        spans = [span for span in spans if span.update == options.update]
    if not spans:
        which = "" if options.update is None else f" of update {options.update}"
        raise ValueError(f"{str(options.file)!r} holds nothing{which}: no swapped update was run.")
    print("\n".join(_lines(spans)))
    if options.plot is not None:
        _draw(spans, options.plot)
        print(f"written: {options.plot}")


def _lines(spans: Sequence[TraceSpan]) -> Iterator[str]:
    """For each update of each device, how long it took and what of it each lane was busy."""
    names = [lane.value for lane in _DEVICE_LANES]
    yield " | ".join(["device  ", "update", "   total", *(f"{name:>8}" for name in names), "moved"])
    yield " | ".join(["--------", "------", "--------", *["--------"] * len(names), "-----"])
    on_device = [span for span in spans if span.lane in _DEVICE_LANES]
    on_device.sort(key=lambda span: (span.device, span.update))
    for (device, update), members in groupby(on_device, lambda span: (span.device, span.update)):
        group = list(members)
        total = max(span.end for span in group) - min(span.start for span in group)
        busy = [sum(span.seconds for span in group if span.lane is lane) for lane in _DEVICE_LANES]
        times = (f"{1e3 * seconds:8.3f}" for seconds in (total, *busy))
        yield " | ".join([f"{device:8}", f"{update:6}", *times, _moved(group)])
    yield "Milliseconds, by the device's clock; wait: the compute stream stood still for a copy."


def _moved(spans: Iterable[TraceSpan]) -> str:
    told = []
    for lane, way in ((TraceLane.LOAD, "in"), (TraceLane.STORE, "out")):
        copies = [span for span in spans if span.lane is lane]
        nbytes, seconds = sum(c.nbytes for c in copies), sum(c.seconds for c in copies)
        speed = f" at {nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else ""
        told.append(f"{format_bytes(nbytes)} {way}{speed}")
    return ", ".join(told)


def _draw(spans: Sequence[TraceSpan], file: Path) -> None:
    devices = sorted({span.device for span in spans})
    figure = new_figure(11, 0.8 + 1.9 * len(devices))
    began = min(span.start for span in spans)
    for number, device in enumerate(devices):
        axes = figure.add_subplot(len(devices), 1, number + 1)
        for row, lane in enumerate(TraceLane):
            members = [s for s in spans if s.device == device and s.lane is lane]
            axes.broken_barh(
                [(1e3 * (s.start - began), 1e3 * s.seconds) for s in members],
                (row - 0.4, 0.8),
                color=_COLOURS[lane],
                edgecolor="white",
                linewidth=0.4,
            )
            for span in members:
                if span.batch is not None:
                    middle = 1e3 * ((span.start + span.end) / 2 - began)
                    text = str(span.batch)
                    axes.text(middle, row, text, ha="center", va="center", fontsize=6, clip_on=True)
        axes.set_yticks(range(len(TraceLane)), [lane.value for lane in TraceLane])
        axes.invert_yaxis()
        axes.set(title=f"{device}; numbers are batches", xlabel="ms")
    figure.savefig(file, dpi=150)
