# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``: what swapping saves and costs, forecast before there is a card."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from swap_core.forecast import Forecast, Hardware, Workload, forecast, recommended
from swap_core.number import Number
from swap_core.picture import need_matplotlib, new_figure
from swap_core.presets import PRESETS
from swap_core.report import format_bytes

__all__ = ["add_plan"]

_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SWAP_TIMES = (4, 8, 16, 32, 64, 128)
_GB = 1e9
_MEMORY_GBPS = 1500.0
"""Assumed where nothing is said: it matters little, since updates are much faster than copies."""
_PARAMETERS = Number(1, 1e15)
_TENSORS = Number(1, 1e5)
_STATES = Number(1, 100)
_DEVICES = Number(1, 1e6)
_ARENAS = Number(2, 1000)
_MILLISECONDS = Number(0.001, 1e9, whole=False)
_RATE = Number(0.001, 1e6, whole=False)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command."""
    _add_model(parser.add_argument_group("the model"))
    _add_hardware(parser.add_argument_group("the hardware"))
    parser.add_argument(
        "--staging-buffers", type=_ARENAS, default=2, help="arenas, >= 2 (default 2)"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
    parser.set_defaults(run=_run)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--params", type=_PARAMETERS, required=True, help="parameters, such as 7e9")
    group.add_argument(
        "--tensors", type=_TENSORS, default=300, help="in so many tensors (default 300)"
    )
    group.add_argument(
        "--largest", type=_PARAMETERS, help="parameters of the largest tensor (default: even)"
    )
    group.add_argument("--param-dtype", choices=_DTYPES, default="bf16", help="(default bf16)")
    group.add_argument(
        "--state-dtype", choices=_DTYPES, help="(default: that of the parameters, as in torch)"
    )
    group.add_argument(
        "--states", type=_STATES, default=2, help="tensors of state per parameter (default 2)"
    )
    group.add_argument(
        "--shards", type=_DEVICES, default=1, help="devices that share them (default 1)"
    )
    group.add_argument("--devices-per-node", type=_DEVICES, default=8, help="(default 8)")
    group.add_argument(
        "--step-ms",
        type=_MILLISECONDS,
        help="of a training step without swapping, to tell its cost in %%",
    )


def _add_hardware(group: argparse._ArgumentGroup) -> None:
    known = "; ".join(f"{name}: {preset.source}" for name, preset in PRESETS.items())
    group.add_argument("--preset", choices=PRESETS, help=f"numbers of a card. {known}")
    group.add_argument("--load-gbps", type=_RATE, help="GB/s from host to device")
    group.add_argument("--store-gbps", type=_RATE, help="GB/s from device to host")
    group.add_argument(
        "--memory-gbps", type=_RATE, help=f"GB/s of the device's memory (default {_MEMORY_GBPS:g})"
    )
    group.add_argument("--no-duplex", action="store_true", help="one direction at a time")


def _run(options: argparse.Namespace) -> None:
    if options.plot is not None:
        need_matplotlib()
    workload, hardware = _workload(options), _hardware(options)
    forecasts = [
        forecast(workload, hardware, times, staging_buffers=options.staging_buffers)
        for times in _SWAP_TIMES
    ]
    best = recommended(forecasts)
    more = forecast(
        workload, hardware, best.swap_times, staging_buffers=options.staging_buffers + 1
    )
    print("\n".join(_lines(options, forecasts, best, more)))
    if options.plot is not None:
        _draw(forecasts, best, options.plot)
        print(f"written: {options.plot}")


def _workload(options: argparse.Namespace) -> Workload:
    largest = options.largest or 0
    if largest > options.params:
        raise ValueError(
            f"--largest {largest:,} is not accepted; the model has {options.params:,} parameters."
        )
    numels = _numels(options.params, options.tensors, largest)
    param, state = _DTYPES[options.param_dtype], _state_bytes(options)
    sizes = tuple(-(-numel // options.shards) * state for numel in numels)
    # States are read and written, parameters too, gradients are read.
    return Workload(sizes, touched_bytes=2 + 3 * param / state)


def _state_bytes(options: argparse.Namespace) -> int:
    """Per parameter."""
    dtype: str = options.state_dtype or options.param_dtype
    states: int = options.states
    return states * _DTYPES[dtype]


def _numels(params: int, tensors: int, largest: int) -> list[int]:
    """Elements of each tensor: the largest first, the others even."""
    largest = max(largest, -(-params // tensors))
    if tensors == 1 or params == largest:
        return [params]
    even, more = divmod(params - largest, tensors - 1)
    others = [even + (index < more) for index in range(tensors - 1)]
    return [largest, *(numel for numel in others if numel)]


def _hardware(options: argparse.Namespace) -> Hardware:
    base = PRESETS[options.preset].hardware if options.preset else None
    rates = {}
    for name in ("load", "store", "memory"):
        given = getattr(options, f"{name}_gbps")
        if name == "memory" and given is None and base is None:
            given = _MEMORY_GBPS
        if given is None and base is None:
            raise ValueError(
                f"--{name}-gbps is missing; give it, or a card with --preset "
                f"({', '.join(PRESETS)})."
            )
        field = f"{name}_bytes_per_second"
        rates[field] = getattr(base, field) if given is None else given * _GB
    return Hardware(**rates, duplex=not options.no_duplex)


def _lines(
    options: argparse.Namespace, forecasts: Sequence[Forecast], best: Forecast, more: Forecast
) -> list[str]:
    state = best.state_bytes
    devices = min(options.shards, options.devices_per_node)
    dtype = options.state_dtype or options.param_dtype
    head = [
        f"{options.params:,} parameters, {options.states} states in {dtype}, "
        f"on {options.shards} devices: {format_bytes(state)} of states per device.",
        f"Swapped: 0 between updates, and {format_bytes(state * devices)} of pinned host memory "
        f"per node of {devices} devices.",
        "",
        "swap_times | in an update | update, ms | native, ms | added, ms | floor, ms",
        "---------- | ------------ | ---------- | ---------- | --------- | ---------",
    ]
    return [
        *head,
        *(_row(each) for each in forecasts),
        "",
        f"Recommended: swap_times={best.swap_times}, with {format_bytes(best.peak_bytes)} of "
        f"device memory in an update and {1e3 * best.added_seconds:,.1f} ms more per step than "
        f"native{_share(options.step_ms, best)}.",
        *_arena_more(options.staging_buffers + 1, best, more),
        "A forecast on a virtual clock, from the rates given; not a measurement.",
    ]


def _row(each: Forecast) -> str:
    milliseconds = (
        each.update_seconds,
        each.native_seconds,
        each.added_seconds,
        each.floor_seconds,
    )
    peak = format_bytes(each.peak_bytes)
    widths = (10, 10, 9, 9)
    told = (f"{1e3 * s:{w},.1f}" for s, w in zip(milliseconds, widths, strict=True))
    return " | ".join([f"{each.swap_times:10}", f"{peak:>12}", *told])


def _arena_more(arenas: int, best: Forecast, more: Forecast) -> list[str]:
    """Where the recommended batches are updated notably faster with an arena more, say so."""
    if recommended([best, more]) is best:
        return []
    return [
        f"With staging_buffers={arenas} as well: {format_bytes(more.peak_bytes)} of device memory "
        f"in an update, {1e3 * more.added_seconds:,.1f} ms more per step."
    ]


def _share(step_ms: float | None, best: Forecast) -> str:
    return "" if step_ms is None else f", {1e5 * best.added_seconds / step_ms:.1f} % of a step"


def _draw(forecasts: Sequence[Forecast], best: Forecast, file: Path) -> None:
    figure = new_figure(7, 4)
    time = figure.subplots()
    memory = time.twinx()
    names = [str(each.swap_times) for each in forecasts]
    peaks = [each.peak_bytes / 2**30 for each in forecasts]
    memory.bar(names, peaks, width=0.5, color="tab:blue", alpha=0.3)
    memory.set_ylabel("device memory in an update, GiB (bars)")
    time.plot(names, [1e3 * each.update_seconds for each in forecasts], marker="o", label="swapped")
    time.plot(names, [1e3 * each.floor_seconds for each in forecasts], "--", label="floor")
    time.plot(names, [1e3 * each.native_seconds for each in forecasts], ":", label="native")
    time.set(xlabel="swap_times", ylabel="update, ms", title=f"recommended: {best.swap_times}")
    time.set_ylim(bottom=0)
    time.legend()
    figure.savefig(file, dpi=120)
