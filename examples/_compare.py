# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeAlias

import torch
from _measure import Run
from rich.table import Table

from swap_core import format_bytes

Tensors: TypeAlias = Mapping[str, torch.Tensor]


def differing(native: Tensors, swapped: Tensors) -> list[str]:
    """Names, in native order, of what is not bit for bit the same in both."""
    return [
        name
        for name in dict.fromkeys([*native, *swapped])
        if name not in native or name not in swapped or not same(native[name], swapped[name])
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes, so that NaN equals the same NaN, and 0 and -0 differ.
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(first, second)


def all_equal(native: Run, swapped: Run) -> bool:
    return not (
        differing(native.losses, swapped.losses)
        or differing(native.parameters, swapped.parameters)
        or differing(native.states, swapped.states)
    )


def table_of(native: Run, swapped: Run, *, simulated: bool) -> Table:
    """Lay the runs out. ``simulated``: the CPU was in the role of an accelerator."""
    table = Table("", native.name, swapped.name, "")

    def row(title: str, show: Callable[[Run], str], finding: str) -> None:
        table.add_row(title, show(native), show(swapped), finding)

    row("loss", _losses, _verdict("steps", native.losses, swapped.losses))
    row(
        "parameters",
        lambda run: _count(run.parameters),
        _verdict("tensors", native.parameters, swapped.parameters),
    )
    row(
        "optimizer states",
        lambda run: _count(run.states),
        _verdict("tensors", native.states, swapped.states),
    )
    table.add_section()
    row("states on device, idle", lambda run: format_bytes(run.idle), "states below min_numel stay")
    row(
        "states on device, peak",
        lambda run: format_bytes(run.peak),
        f"{swapped.peak / native.peak:.0%} of native, only inside an update",
    )
    row("states on host", lambda run: format_bytes(run.host), "")
    if native.allocator and swapped.allocator:
        row("allocator, after a step", lambda run: _allocated(run, 0), "everything on the device")
        row("allocator, peak", lambda run: _allocated(run, 1), "everything on the device")
    table.add_section()
    ratio = median(swapped.step_times) / median(native.step_times)
    caution = " (a memcpy, no real link)" if simulated else ""
    row("optimizer.step(), median", _step_time, f"{ratio:.2f} x native{caution}")
    return table


def _verdict(what: str, native: Tensors, swapped: Tensors) -> str:
    names = differing(native, swapped)
    if not names:
        return f"[green]equal[/], bit for bit: {len(native)} {what}"
    return f"[bold red]DIFFERENT[/] in {len(names)} of {len(native)} {what}, first: {names[0]}"


def _losses(run: Run) -> str:
    losses = [loss.item() for loss in run.losses.values()]
    return f"{losses[0]:.4f} to {losses[-1]:.4f}"


def _count(tensors: Tensors) -> str:
    return f"{sum(tensor.numel() for tensor in tensors.values()):,} values"


def _allocated(run: Run, which: int) -> str:
    return format_bytes(run.allocator[which]) if run.allocator else ""


def _step_time(run: Run) -> str:
    return f"{1e3 * median(run.step_times):.2f} ms"
