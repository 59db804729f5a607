# SPDX-License-Identifier: Apache-2.0
"""Draw an update as the real pipelines run it on a virtual clock.

``python docs/checks/pictures.py`` writes docs/pictures/update.svg.

Times are those of ``VirtualDevice``, so they are the same on every machine; they are also written
into the picture's description, by which ``test_pictures.py`` knows whether it is up to date.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from swap_core import (
    Batch,
    BatchTimes,
    Ledger,
    PackedPipeline,
    PerTensorPipeline,
    VirtualDevice,
    VirtualEvent,
    VirtualMemory,
    step_times,
)

__all__ = ["PICTURE", "times"]

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "update.svg"
BATCHES, NBYTES = 6, 64 * 2**20
GBPS, UPDATE_SECONDS = 50e9, 0.6e-3
COLOURS = {"load": "#4c9f70", "update": "#4062bb", "store": "#d1793b"}


def times() -> dict[str, list[dict[str, float]]]:
    """For each pipeline, the milliseconds at which each batch begins and ends each move."""
    return {"packed": _rounded(_packed()), "per tensor": _rounded(_per_tensor())}


def _packed() -> tuple[BatchTimes, ...]:
    device = VirtualDevice(GBPS, GBPS)
    arenas = [VirtualMemory(NBYTES) for _ in range(2)]
    batches = [_batch(index, arenas[index % 2]) for index in range(BATCHES)]
    pipeline = PackedPipeline(device, Ledger(), [(arena, NBYTES) for arena in arenas])
    pipeline.run(batches, lambda index: device.compute(UPDATE_SECONDS), lambda: None)
    return _times_of(batches, packed=True)


def _per_tensor() -> tuple[BatchTimes, ...]:
    device = VirtualDevice(GBPS, GBPS)
    batches = [_batch(index, VirtualMemory(NBYTES)) for index in range(BATCHES)]
    pipeline = PerTensorPipeline(device, Ledger())
    pipeline.run(batches, lambda index: device.compute(UPDATE_SECONDS), lambda: None)
    return _times_of(batches, packed=False)


def _batch(index: int, memory: VirtualMemory) -> Batch[VirtualEvent, VirtualMemory, int]:
    restored, loaded, updated, stored = (VirtualEvent() for _ in range(4))
    return Batch(
        index=index, nbytes=NBYTES, memory=memory, transfers=(NBYTES,),
        restored=restored, loaded=loaded, updated=updated, stored=stored,
    )  # fmt: skip


def _times_of(
    batches: list[Batch[VirtualEvent, VirtualMemory, int]], *, packed: bool
) -> tuple[BatchTimes, ...]:
    return step_times(
        [batch.loaded.at for batch in batches],
        [batch.updated.at for batch in batches],
        [batch.stored.at for batch in batches],
        ring=2,
        update_after_store=not packed,
    ).batches


def _rounded(batches: tuple[BatchTimes, ...]) -> list[dict[str, float]]:
    fields = BatchTimes.__slots__
    return [{name: round(1e3 * getattr(each, name), 6) for name in fields} for each in batches]


def draw(file: Path) -> None:
    """Draw both pipelines below each other, with a lane for each stream."""
    mpl.rcParams["svg.hashsalt"] = "swap"
    data = times()
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(len(data), sharex=True)
    for axes, (name, batches) in zip(panels, data.items(), strict=True):
        for lane, (move, colour) in enumerate(COLOURS.items()):
            for index, at in enumerate(batches):
                start, end = at[f"{move}_start"], at[f"{move}_end"]
                axes.barh(lane, end - start, left=start, color=colour, edgecolor="white")
                axes.text((start + end) / 2, lane, str(index), ha="center", va="center",
                          color="white", fontsize=8)  # fmt: skip
        axes.set(title=f"{name}: batches 0 to {BATCHES - 1}", ylim=(-0.6, 2.6))
        axes.set_yticks(range(len(COLOURS)), COLOURS)
        axes.invert_yaxis()
    panels[-1].set_xlabel("milliseconds (virtual clock)")
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, metadata={"Description": json.dumps(data), "Date": None})


if __name__ == "__main__":
    draw(PICTURE)
