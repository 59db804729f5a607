# SPDX-License-Identifier: Apache-2.0
"""Measure what a swapped step costs on the host, next to the native step.

    python benchmarks/host_overhead.py --only one-element --check  # the project's targets
    python benchmarks/host_overhead.py --json result.json          # everything; some minutes

Of the workload ``rfc`` (25,239,552 parameters in 816 tensors), ``one-element`` keeps one element
per tensor: nothing to compute or to move, only the work of the host. There are the targets.

``native`` is ``torch.optim.AdamW``; ``kernels`` are just the kernels that it runs, called on lists
of local tensors that are ready, so nothing on the host can be faster; ``naive`` resizes and copies
each state by itself and builds all lists in each step; ``per-tensor`` and ``packed`` are
``swap_optimizer`` on a CPU as device, whose streams and events are Python objects and part of the
time. Each round is one step of each, in random order, so noise of the machine hits all alike. All
must end with the same bits.

``net`` is what is left of a swapped step and of the native step when the time of ``kernels`` is
taken from both. On a CPU foreach kernels are loops over the tensors, which a device runs itself: of
a native foreach step of DTensors they are more than a third, so there the target is for ``net``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_common import console, machine
from rich import box
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW
from torch.optim.adam import adam
from torch.utils._python_dispatch import TorchDispatchMode

from swap_core import SwapOptimizerConfig
from swap_testkit.torch import CpuAsDevice
from swap_torch import swap_optimizer
from swap_torch.kernels import AdamLists, AdamNumbers, AdamOptions, direct_adam

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one-element": [(1,)] * 816,
    "rfc": [*[(64, 1024)] * 8, *[(128,)] * 6, *[(256,)] * 3] * 48,
}
# What runs, and an operator that only this implementation calls.
IMPLEMENTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "for-loop": ({"foreach": False}, "lerp_"),
    "foreach": ({"foreach": None}, "_foreach_lerp_"),
    "fused": ({"fused": True}, "_fused_adamw_"),
}
# foreach=True is refused at wrapping, and foreach=None, native or swapped, chooses the for-loop on
# a CPU. With this it chooses foreach, for all contenders alike. The other rows do not ask.
_MODULE, _NAME = sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices"
FOREACH_ON_CPU = mock.patch.object(_MODULE, _NAME, return_value=["cpu"])
# For each workload, the most that a packed step may take, in native steps.
# FSDP2 makes a gradient with the very spec object of its parameter (`to_sharded_dtensor`), and so
# does `dtensor`. In `dtensor-equal-spec` it is another object with the same content.
WORKLOADS: dict[str, dict[str, float]] = {
    "one-element/plain": {"for-loop": 1.05, "foreach": 1.1, "fused": 1.0},
    "one-element/dtensor": dict.fromkeys(IMPLEMENTATIONS, 0.4),
    "one-element/dtensor-equal-spec": dict.fromkeys(IMPLEMENTATIONS, 0.4),
    "rfc/plain": {},
    "rfc/dtensor": {},
}
NET = ("one-element/dtensor foreach", "one-element/dtensor-equal-spec foreach")
# What the targets hold for, of the step or, in rows of NET, of its net time. Processor time leaves
# out the turns of other processes; what else disturbs a step only adds to it, so the minimum is
# nearest to what the code itself takes.
CHECKED = "CPU min"
SWAP_TIMES = 16


def parameters(workload: str) -> list[Tensor]:
    """The same values and gradients each time."""
    shapes, wrapping = workload.split("/")
    generator = torch.Generator().manual_seed(0)
    params: list[Tensor] = []
    for shape in SHAPES[shapes]:
        value, grad = (torch.randn(shape, generator=generator) * 0.02 for _ in range(2))
        if wrapping != "plain":
            value, grad = (distribute_tensor(each, mesh(), [Shard(0)]) for each in (value, grad))
        param = torch.nn.Parameter(value)
        if isinstance(param, DTensor) and wrapping == "dtensor":
            grad = DTensor(local(grad), param._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        param.grad = grad
        params.append(param)
    return params


@cache
def mesh() -> DeviceMesh:
    """This process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass
class Contender:
    """An optimizer that steps as it is, native or swapped."""

    optimizer: AdamW

    def step(self) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        """Let ``optimizer.state`` hold the current values."""

    def counts(self) -> dict[str, int]:
        """The ledger of a swapped optimizer."""
        report = getattr(self.optimizer, "swap_report", None)
        return asdict(report().ledger) if report else {}


def collect(optimizer: AdamW) -> Iterator[list[list[Tensor]]]:
    """For each group, the functional's arguments. The first time, this makes the states."""
    for group in optimizer.param_groups:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        optimizer._init_group(group, *lists)  # type: ignore[no-untyped-call]
        yield lists


class NaiveSwap(Contender):
    """Each state by itself, and all lists anew in each step."""

    def __init__(self, optimizer: AdamW) -> None:
        super().__init__(optimizer)
        states = [state for group in collect(optimizer) for state in group[2] + group[3]]
        self.mirrors = {state: local(state).clone() for state in states}
        self.store(states)

    @torch.no_grad()
    def step(self) -> None:
        for group, lists in zip(self.optimizer.param_groups, collect(self.optimizer), strict=True):
            # The functional's other arguments have the names of the options.
            options = {key: value for key, value in group.items() if key not in ("params", "betas")}
            options["beta1"], options["beta2"] = group["betas"]
            count = len(lists[0])
            for index in range(SWAP_TIMES):
                part = slice(index * count // SWAP_TIMES, (index + 1) * count // SWAP_TIMES)
                params, grads, firsts, seconds, maxima, steps = (each[part] for each in lists)
                self.load(firsts + seconds)
                adam(params, grads, firsts, seconds, maxima, steps, **options)
                self.store(firsts + seconds)

    def load(self, states: Iterable[Tensor]) -> None:
        for state in states:
            tensor, mirror = local(state), self.mirrors[state]
            tensor.untyped_storage().resize_(mirror.numel() * mirror.element_size())
            tensor.copy_(mirror, non_blocking=True)

    def store(self, states: Iterable[Tensor]) -> None:
        for state in states:
            tensor = local(state)
            self.mirrors[state].copy_(tensor, non_blocking=True)
            tensor.untyped_storage().resize_(0)

    def finish(self) -> None:
        self.load(self.mirrors)


class BareKernels(Contender):
    """Just the kernels, on lists that are collected once."""

    def __init__(self, optimizer: AdamW) -> None:
        super().__init__(optimizer)
        (group,) = optimizer.param_groups
        (lists,) = collect(optimizer)
        params, grads, firsts, seconds, maxima, steps = ([local(t) for t in li] for li in lists)
        # Counters in a row, as swapping keeps them; with `finish`, each its own again.
        self.steps, self.row = steps, torch.stack(steps)
        counters = list(self.row.unbind())
        self.lists = AdamLists(params, grads, firsts, seconds, maxima, counters, self.row)
        beta1, beta2 = group["betas"]
        lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
        self.numbers = AdamNumbers(lr, beta1, beta2, eps, weight_decay)
        name = implementation_of(group)
        self.options = AdamOptions(
            fused=name == "fused",
            foreach=name == "foreach",
            amsgrad=False,
            maximize=False,
            decays=True,
            decoupled=True,
        )

    @torch.no_grad()
    def step(self) -> None:
        direct_adam(self.lists, self.options, self.numbers)

    def finish(self) -> None:
        torch._foreach_copy_(self.steps, list(self.row.unbind()))


def implementation_of(group: dict[str, Any]) -> str:
    """The name of what a group's options choose, with FOREACH_ON_CPU."""
    return "fused" if group["fused"] else "for-loop" if group["foreach"] is False else "foreach"


def swapped(packed: bool, optimizer: AdamW) -> Contender:
    # min_numel=0: every state swaps, also in tensors of one element.
    config = SwapOptimizerConfig(swap_times=SWAP_TIMES, min_numel=0, packed_swap=packed)
    return Contender(swap_optimizer(optimizer, config, device=CpuAsDevice()))


CONTENDERS: dict[str, Callable[[AdamW], Contender]] = {
    "native": Contender,
    "kernels": BareKernels,
    "naive": NaiveSwap,
    "per-tensor": partial(swapped, False),
    "packed": partial(swapped, True),
}


class SeenOperators(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def verify_implementation(contender: Contender, expected: str, where: str) -> None:
    with SeenOperators() as seen:
        contender.step()
    ran = [name for name, (_, operator) in IMPLEMENTATIONS.items() if operator in seen.names]
    if ran != [expected]:
        sys.exit(f"{where}: expected {expected}, but {ran} ran")


@dataclass
class Result:
    """One contender in one row."""

    workload: str
    implementation: str
    contender: str
    ms: dict[str, float]  # of a step
    ratios: dict[str, float]  # of these to native's
    counts: dict[str, float]  # what its ledger counted in a measured step, on average
    net: float | None  # the ratio of CHECKED without the kernels; packed steps only
    limit: float | None  # the most that the ratio of CHECKED, or in rows of NET this, may be

    @property
    def row(self) -> str:
        """Its row, as NET has it."""
        return f"{self.workload} {self.implementation}"

    def checked(self) -> float:
        """What the limit is for."""
        return self.ratios[CHECKED] if self.net is None or self.row not in NET else self.net


def figures(times: list[tuple[float, float]]) -> dict[str, float]:
    spent = [1e3 * fold(clock) for clock in zip(*times, strict=True) for fold in (min, median)]
    return dict(zip(("min", "median", "CPU min", "CPU median"), spent, strict=True))


def measure_row(workload: str, name: str, repeats: int) -> list[Result]:
    """One workload, one implementation, all contenders."""
    options, _ = IMPLEMENTATIONS[name]
    with FOREACH_ON_CPU:
        contenders = {
            key: make(AdamW(parameters(workload), **options)) for key, make in CONTENDERS.items()
        }
        for key, contender in contenders.items():
            verify_implementation(contender, name, f"{workload} {name} {key}")
        run_rounds(contenders, 3)
        before = {key: contender.counts() for key, contender in contenders.items()}
        times = run_rounds(contenders, repeats)
    verify_bits(contenders, f"{workload} {name}")
    results, native, kernels = [], figures(times["native"]), figures(times["kernels"])
    for key, contender in contenders.items():
        ms, after = figures(times[key]), contender.counts()
        ratios = {figure: ms[figure] / native[figure] for figure in ms}
        counts = {field: (after[field] - old) / repeats for field, old in before[key].items()}
        net = (ms[CHECKED] - kernels[CHECKED]) / (native[CHECKED] - kernels[CHECKED])
        limit = WORKLOADS[workload].get(name)
        told = (net, limit) if key == "packed" else (None, None)
        results.append(Result(workload, name, key, ms, ratios, counts, *told))
    return results


def run_rounds(
    contenders: dict[str, Contender], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each step."""
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in contenders}
    order, generator = list(contenders), random.Random(0)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        generator.shuffle(order)
        for key in order:
            wall, cpu = perf_counter(), process_time()
            contenders[key].step()
            times[key].append((perf_counter() - wall, process_time() - cpu))
    gc.enable()
    return times


def verify_bits(contenders: dict[str, Contender], where: str) -> None:
    """A benchmark of a wrong result is worthless."""
    values: dict[str, list[Tensor]] = {}
    for key, contender in contenders.items():
        contender.finish()
        state = contender.optimizer.state
        params = contender.optimizer.param_groups[0]["params"]
        values[key] = [local(each) for p in params for each in (p.detach(), *state[p].values())]
        if not all(starmap(torch.equal, zip(values["native"], values[key], strict=True))):
            sys.exit(f"{where}: parameters or states of {key} are not those of native")


def failures(results: Sequence[Result]) -> Iterator[str]:
    for each in results:
        ratio = each.checked()
        if each.limit is not None and ratio > each.limit:
            what = "the net time of packed" if each.row in NET else "packed"
            yield f"{each.row}: {what} is {ratio:.3f} x native; the target is <= {each.limit} x"
        for field in ("plans_built", "views_made", "host_allocations"):
            if each.counts.get(field):
                yield f"{each.row} {each.contender}: {each.counts[field]:g} {field} per step, not 0"


def table(workload: str, results: Sequence[Result]) -> Table:
    sizes = [torch.Size(shape).numel() for shape in SHAPES[workload.split("/")[0]]]
    title = f"{workload}: {len(sizes)} tensors, {sum(sizes):,} parameters; × is relative to native"
    drawn, shown = Table("", "step", title=title, box=box.MARKDOWN), ("min", "median", "CPU min")
    numbers = (*(f"{name} ms" for name in shown), *(f"× {name}" for name in shown))
    for column in (*numbers, "× net", "target", "copies", "new plans + views"):
        drawn.add_column(column, justify="right")
    for each in results:
        spent = (f"{value[name]:.2f}" for value in (each.ms, each.ratios) for name in shown)
        net = "" if each.net is None else f"{each.net:.2f}"
        mark = " net" if each.row in NET else ""
        target = "" if each.limit is None else f"≤ {each.limit:.2f}{mark}"
        pairs = ("copies_in", "copies_out"), ("plans_built", "views_made")
        told = (" + ".join(f"{each.counts[k]:g}" for k in pair if each.counts) for pair in pairs)
        drawn.add_row(each.implementation, each.contender, *spent, net, target, *told)
    return drawn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the host-side cost of a swapped step.")
    parser.add_argument("--repeats", type=int, default=20, help="measured steps of each contender")
    parser.add_argument("--quick", dest="repeats", action="store_const", const=5, help="5 repeats")
    parser.add_argument("--threads", type=int, default=1, help="of torch's operators (1)")
    parser.add_argument("--only", nargs="+", default=[], help="rows that have all these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    terminal, here = console(), machine() | {"threads": torch.get_num_threads()}
    terminal.print(", ".join(f"{key} {value}" for key, value in here.items()))
    results: list[Result] = []
    for workload in WORKLOADS:
        names = [n for n in IMPLEMENTATIONS if all(w in f"{workload} {n}" for w in args.only)]
        rows = [row for name in names for row in measure_row(workload, name, args.repeats)]
        if rows:
            terminal.print(table(workload, rows))
        results += rows
    if args.json:
        content = {"machine": here, "repeats": args.repeats, "results": list(map(asdict, results))}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    missed = list(failures(results)) if results else [f"no row has all of {args.only}"]
    terminal.print("\n".join(missed))
    sys.exit(1 if args.check and missed else 0)


if __name__ == "__main__":
    main()
