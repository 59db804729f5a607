# SPDX-License-Identifier: Apache-2.0
"""The picture: loss curves, and the device memory of the optimizer over one step."""

from __future__ import annotations

from pathlib import Path

from _measure import Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NATIVE, SWAPPED = "tab:orange", "tab:blue"
SHADES = {"forward": "0.95", "backward": "0.88", "update": "#dbe6f4"}
MIB = 2**20


def draw(native: Run, swapped: Run, title: str, file: Path) -> None:
    """Write the picture; the ending of ``file`` decides its format."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplot_mosaic([["loss", "step"], ["loss", "update"]])
    _draw_losses(axes["loss"], native, swapped)
    _draw_step(axes["step"], native, swapped)
    _draw_update(axes["update"], native, swapped)
    figure.savefig(file, dpi=110)


def _draw_losses(axes: Axes, native: Run, swapped: Run) -> None:
    # One lies on the other: a thick line, and a thin dashed one on top of it.
    for run, colour, width, style in ((native, NATIVE, 4.0, "-"), (swapped, SWAPPED, 1.5, "--")):
        losses = [loss.item() for loss in run.losses.values()]
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, style, color=colour, linewidth=width, label=run.name)
    axes.set(title="Training loss", xlabel="step", ylabel="cross entropy (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_step(axes: Axes, native: Run, swapped: Run) -> None:
    phases = swapped.last_step.phases
    for (phase, shade), start, end in zip(SHADES.items(), phases, phases[1:], strict=False):
        axes.axvspan(1e3 * (start - phases[0]), 1e3 * (end - phases[0]), color=shade, label=phase)
    _draw_memory(axes, native, swapped, phases[0])
    axes.set_title("Optimizer states on the device, over the last step")


def _draw_update(axes: Axes, native: Run, swapped: Run) -> None:
    start, stores = swapped.last_step.phases[-2], swapped.last_step.stores
    for index, (begin, end) in enumerate(zip([start, *stores], stores, strict=False)):
        label = f"batches {index + 1}, {index + 3}, ..." if index < 2 else None
        shade = (SHADES["update"], SHADES["forward"])[index % 2]
        axes.axvspan(1e3 * (begin - start), 1e3 * (end - start), color=shade, label=label)
    _draw_memory(axes, native, swapped, start)
    axes.set_title(f"The same, inside its update of {len(stores)} batches")


def _draw_memory(axes: Axes, native: Run, swapped: Run, start: float) -> None:
    step = swapped.last_step
    end = step.phases[-1]
    points = [(start, step.held[0][1]), *step.held, (end, step.held[-1][1])]
    times = [1e3 * (time - start) for time, _ in points]
    held = [(step.stay + nbytes) / MIB for _, nbytes in points]
    axes.axhline(native.peak / MIB, color=NATIVE, linewidth=3, label=native.name)
    axes.step(times, held, where="post", color=SWAPPED, linewidth=2, label=swapped.name)
    axes.fill_between(times, held, step="post", color=SWAPPED, alpha=0.4)
    axes.set(
        xlabel="time (ms on the host's clock)", ylabel="device memory (MiB)", xlim=(0, times[-1])
    )
    axes.set_ylim(0, 1.15 * max(native.peak, swapped.peak) / MIB)
    axes.legend(loc="center left", framealpha=1)
