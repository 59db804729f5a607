# SPDX-License-Identifier: Apache-2.0
"""What streams did and when, in the file format that Chrome, Perfetto and :mod:`swap_core` read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = [
    "TraceLane",
    "TraceSpan",
    "check_trace_file",
    "read_trace",
    "whole_or_none",
    "write_trace",
]

_MICRO = 1e6


class TraceLane(Enum):
    """A row of a trace. The value is its name."""

    LOAD = "load"
    """Copies to the device."""
    UPDATE = "update"
    """Kernels of updates, on the compute stream."""
    STORE = "store"
    """Copies to the host."""
    WAIT = "wait"
    """The compute stream stands still for a copy."""
    HOST = "host"
    """The host queues work, takes memory, or waits for the device; by its own clock."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One thing that took time."""

    device: str
    """On which device, such as ``cuda:0``."""
    lane: TraceLane
    name: str
    """Such as ``load[3]``, for batch 3."""
    start: float
    """Seconds since the trace began."""
    end: float
    batch: int | None = None
    nbytes: int = 0
    """Bytes copied."""
    update: int = 0
    """Which update of the trace, from 1; 0 outside of updates."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def check_trace_file(file: str | Path) -> Path:
    """Make sure that a trace can be written, before anything runs. Leaves an empty file.

    Raises:
        OSError: it cannot; names the file.
    """
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"trace: {str(path)!r} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"trace: {str(path)!r} cannot be written, because the folder {str(path.parent)!r} does "
            f"not exist; make it first."
        )
    path.write_text("")
    return path


@contextmanager
def whole_or_none(file: Path) -> Iterator[None]:
    """Write a file inside ``with``; if something raises there, no part of the file is left."""
    try:
        yield
    except BaseException:
        if file.is_file():  # not a pipe, or /dev/stdout
            file.unlink()
        raise


def write_trace(file: Path, spans: Iterable[TraceSpan], about: dict[str, Any]) -> None:
    """Write spans as a Chrome trace: load it at https://ui.perfetto.dev or chrome://tracing.

    Args:
        file: Where to; what is there is replaced.
        spans: In any order.
        about: What else the file tells, such as versions.
    """
    spans = sorted(spans, key=lambda span: (span.start, -span.end))
    devices = list(dict.fromkeys(span.device for span in spans))
    events: list[dict[str, Any]] = []
    for pid, device in enumerate(devices):
        events.append(_named("process_name", pid, 0, device))
        events += (_named("thread_name", pid, i, lane.value) for i, lane in enumerate(TraceLane))
    order = list(TraceLane)
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane.value,
                "pid": devices.index(span.device),
                "tid": order.index(span.lane),
                "ts": span.start * _MICRO,
                "dur": span.seconds * _MICRO,
                "args": {"batch": span.batch, "bytes": span.nbytes, "update": span.update},
            }
        )
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    file.write_text(json.dumps(content))


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def read_trace(file: str | Path) -> Sequence[TraceSpan]:
    """Read a file of :func:`write_trace`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    try:
        events = json.loads(Path(file).read_text())["traceEvents"]
        names = {
            event["pid"]: event["args"]["name"]
            for event in events
            if event["name"] == "process_name"
        }
        return [_span(event, names) for event in events if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"trace: {str(file)!r} is no trace of optimizer.trace(FILE) ({error!r})."
        ) from error


def _span(event: dict[str, Any], names: dict[int, str]) -> TraceSpan:
    args = event["args"]
    start = event["ts"] / _MICRO
    return TraceSpan(
        device=names[event["pid"]],
        lane=TraceLane(event["cat"]),
        name=event["name"],
        start=start,
        end=start + event["dur"] / _MICRO,
        batch=args["batch"],
        nbytes=args["bytes"],
        update=args["update"],
    )
