# SPDX-License-Identifier: Apache-2.0
"""Measure what a swapped step costs on the host, next to the native step.

    python benchmarks/host_overhead.py                              # everything, 3 to 6 minutes
    python benchmarks/host_overhead.py --only one-element --check   # the project's targets
    python benchmarks/host_overhead.py --only rfc --repeats 9 --json result.json

The workload is the RFC's: 48 x (8 x [64, 1024], 6 x [128], 3 x [256]), that is 816 tensors with
25,239,552 parameters and 192.56 MiB of AdamW states. With one element in each of the 816 tensors
there is nothing to compute or to move, so what is left is the work of the host: one-element rows
have targets. The other rows show what the copies cost where "device" memory is CPU memory, with
nothing that overlaps; they say nothing about an accelerator.

Contenders:

- native: ``torch.optim.AdamW``.
- naive: what is easily written, each state resized and copied by itself, lists built in each step.
- per-tensor, packed: ``swap_optimizer`` on :class:`swap_testkit.torch.CpuAsDevice`, whose streams,
  events and copies are Python objects and part of the time.

In each round every contender does one step, in random order, so noise of the machine hits all
alike. All start from the same values; that all end with the same bits is checked.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from swap_core import Ledger, SwapOptimizerConfig
from swap_testkit.torch import CpuAsDevice
from swap_torch import is_swap_optimizer, swap_optimizer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW
from torch.optim.adam import adam
from torch.utils._python_dispatch import TorchDispatchMode

# min_numel=0: every state swaps, also in tensors of one element.
SWAP_TIMES = 16
CONFIG = {"swap_times": SWAP_TIMES, "min_numel": 0}

RFC_SHAPES = [*[(64, 1024)] * 8, *[(128,)] * 6, *[(256,)] * 3] * 48
ONE_ELEMENT_SHAPES = [(1,)] * len(RFC_SHAPES)

# foreach=True is refused at wrapping, and foreach=None is a for-loop on the CPU: see `row_context`.
IMPLEMENTATIONS: dict[str, dict[str, bool | None]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": None},
    "fused": {"fused": True},
}
OPERATORS = {"lerp_": "for-loop", "_foreach_lerp_": "foreach", "_fused_adamw_": "fused"}
"""An operator that only this implementation calls."""


# The workload.


@dataclass(frozen=True)
class Workload:
    """Parameters of certain shapes, plain or as DTensors on a mesh of one process.

    FSDP2 gives each gradient the very spec object of its parameter (``to_sharded_dtensor``), hence
    ``dtensor``. In ``dtensor-own-spec`` the specs are equal objects, as from other code.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    wrapping: str
    limits: dict[str, float]
    """For each implementation, the most that packed may take, relative to native."""

    def parameters(self) -> list[torch.Tensor]:
        """Make the same parameters and gradients each time."""
        generator = torch.Generator().manual_seed(0)
        params = []
        for shape in self.shapes:
            value, grad = (torch.randn(shape, generator=generator) * 0.02 for _ in range(2))
            param = torch.nn.Parameter(self._wrap(value))
            param.grad = self._wrap_grad(grad, param)
            params.append(param)
        return params

    def _wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.wrapping == "plain" else distribute_tensor(tensor, mesh(), [Shard(0)])

    def _wrap_grad(self, grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        if self.wrapping != "dtensor":
            return self._wrap(grad)
        assert isinstance(param, DTensor)
        return DTensor(grad, param._spec, requires_grad=False)  # type: ignore[no-any-return]


ALL_LIMITS = dict.fromkeys(IMPLEMENTATIONS, 0.4)
WORKLOADS = (
    Workload(
        "one-element/plain",
        ONE_ELEMENT_SHAPES,
        "plain",
        {"for-loop": 1.05, "foreach": 1.1, "fused": 1.0},
    ),
    Workload("one-element/dtensor", ONE_ELEMENT_SHAPES, "dtensor", ALL_LIMITS),
    Workload("one-element/dtensor-own-spec", ONE_ELEMENT_SHAPES, "dtensor-own-spec", ALL_LIMITS),
    Workload("rfc/plain", RFC_SHAPES, "plain", {}),
    Workload("rfc/dtensor", RFC_SHAPES, "dtensor", {}),
)


def mesh() -> DeviceMesh:
    """A mesh of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# The contenders.


class Contender:
    """An optimizer that steps as it is, native or swapped."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        """Let ``optimizer.state`` hold the current values."""

    def ledger(self) -> Ledger | None:
        if not is_swap_optimizer(self.optimizer):
            return None
        ledger: Ledger = self.optimizer.swap_report().ledger  # type: ignore[attr-defined]
        return ledger


class NaiveSwap(Contender):
    """Each state by itself, and all lists anew in each step."""

    def __init__(self, optimizer: AdamW) -> None:
        super().__init__(optimizer)
        self.mirrors: dict[torch.Tensor, torch.Tensor] = {}
        for group in optimizer.param_groups:
            # It makes the states that do not exist.
            optimizer._init_group(group, *(lists := [[] for _ in range(6)]))
            self.mirrors.update({state: local(state).clone() for state in lists[2] + lists[3]})
        self.store(list(self.mirrors))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.optimizer.param_groups:
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            has_complex = self.optimizer._init_group(group, *lists)
            count = len(lists[0])
            for index in range(SWAP_TIMES):
                part = slice(index * count // SWAP_TIMES, (index + 1) * count // SWAP_TIMES)
                batch = [tensors[part] for tensors in lists]
                self.load(batch[2] + batch[3])
                self.update(group, batch, has_complex)
                self.store(batch[2] + batch[3])

    def update(
        self, group: dict[str, Any], batch: list[list[torch.Tensor]], has_complex: bool
    ) -> None:
        same_names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "fused")
        adam(
            *batch,
            has_complex=has_complex,
            decoupled_weight_decay=True,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in same_names},
        )

    def load(self, states: list[torch.Tensor]) -> None:
        for state in states:
            tensor, mirror = local(state), self.mirrors[state]
            tensor.untyped_storage().resize_(mirror.numel() * mirror.element_size())
            tensor.copy_(mirror, non_blocking=True)

    def store(self, states: list[torch.Tensor]) -> None:
        for state in states:
            tensor = local(state)
            self.mirrors[state].copy_(tensor, non_blocking=True)
            tensor.untyped_storage().resize_(0)

    def finish(self) -> None:
        self.load(list(self.mirrors))


def swapped(packed: bool) -> Callable[[AdamW], Contender]:
    config = SwapOptimizerConfig(packed_swap=packed, **CONFIG)  # type: ignore[arg-type]
    return lambda optimizer: Contender(swap_optimizer(optimizer, config, device=CpuAsDevice()))


CONTENDERS: dict[str, Callable[[AdamW], Contender]] = {
    "native": Contender,
    "naive": NaiveSwap,
    "per-tensor": swapped(packed=False),
    "packed": swapped(packed=True),
}


# Which implementation runs.


def row_context(implementation: str) -> AbstractContextManager[object]:
    """Let ``foreach=None`` choose foreach on the CPU too, for native and swapped alike."""
    if implementation != "foreach":
        return nullcontext()
    name = "_get_foreach_kernels_supported_devices"
    return mock.patch.object(sys.modules["torch.optim.optimizer"], name, lambda: ["cpu"])


class Implementation(TorchDispatchMode):
    """Collects the implementations whose operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATORS:
            self.seen.add(OPERATORS[name])
        return func(*args, **kwargs or {})


def verify_implementation(contender: Contender, expected: str, name: str) -> None:
    with Implementation() as implementation:
        contender.step()
    if implementation.seen != {expected}:
        sys.exit(f"{name}: expected {expected}, but {sorted(implementation.seen)} ran")


# Measuring.


@dataclass
class Result:
    """What one contender took, and what it counted per step (None if it does not swap)."""

    workload: str
    implementation: str
    contender: str
    min_ms: float
    median_ms: float
    cpu_min_ms: float
    cpu_median_ms: float
    min_ratio: float = 1.0
    """To native."""
    median_ratio: float = 1.0
    copies_in: float | None = None
    copies_out: float | None = None
    plans: int | None = None
    """Since wrapping."""
    new_plans: int | None = None
    """During all measured steps together; as ``new_views``."""
    new_views: int | None = None
    limit: float | None = None
    """The most that ``min_ratio`` may be."""


def measure_row(
    workload: Workload, implementation: str, warmup: int, repeats: int
) -> Iterator[Result]:
    options = IMPLEMENTATIONS[implementation]
    where = f"{workload.name} {implementation}"
    with row_context(implementation):
        contenders = {
            name: make(AdamW(workload.parameters(), **options))  # type: ignore[arg-type]
            for name, make in CONTENDERS.items()
        }
        for name, contender in contenders.items():
            verify_implementation(contender, implementation, f"{where} {name}")
        run_rounds(contenders, warmup)
        before = {name: contender.ledger() for name, contender in contenders.items()}
        times = run_rounds(contenders, repeats)
    verify_bits(contenders, where)
    native: Result | None = None
    for name, contender in contenders.items():
        walls, cpus = ([seconds * 1e3 for seconds in column] for column in zip(*times[name]))
        spent = (min(walls), median(walls), min(cpus), median(cpus))
        result = Result(workload.name, implementation, name, *spent)
        native = native or result
        result.min_ratio = result.min_ms / native.min_ms
        result.median_ratio = result.median_ms / native.median_ms
        result.limit = workload.limits.get(implementation) if name == "packed" else None
        count(result, before[name], contender.ledger(), repeats)
        yield result


def run_rounds(
    contenders: dict[str, Contender], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each step."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    shuffled, order = list(contenders.items()), random.Random(0)
    with no_garbage_collection():
        for _ in range(rounds):
            order.shuffle(shuffled)
            for name, contender in shuffled:
                wall, cpu = perf_counter(), process_time()
                contender.step()
                times[name].append((perf_counter() - wall, process_time() - cpu))
    return times


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count(result: Result, before: Ledger | None, after: Ledger | None, steps: int) -> None:
    if before is None or after is None:
        return
    result.copies_in = (after.copies_in - before.copies_in) / steps
    result.copies_out = (after.copies_out - before.copies_out) / steps
    result.plans = after.plans_built
    result.new_plans = after.plans_built - before.plans_built
    result.new_views = after.views_made - before.views_made


def verify_bits(contenders: dict[str, Contender], where: str) -> None:
    """A benchmark of a wrong result is worthless."""
    values: dict[str, list[torch.Tensor]] = {}
    for name, contender in contenders.items():
        contender.finish()
        state = contender.optimizer.state
        params = contender.optimizer.param_groups[0]["params"]
        found = [tensor for p in params for tensor in (p.detach(), *state[p].values())]
        values[name] = [local(tensor) for tensor in found]
    for name, tensors in values.items():
        if not all(map(torch.equal, values["native"], tensors)):
            sys.exit(f"{where}: parameters or states of {name} are not those of native")


# Telling.


def failures(results: Sequence[Result]) -> Iterator[str]:
    """Targets that are missed.

    They hold for the ratio of the minima: other load on the machine only ever adds time, so the
    minimum is nearest to what the code itself takes, and the most reproducible.
    """
    for r in results:
        where = f"{r.workload} {r.implementation} {r.contender}"
        if r.limit is not None and r.min_ratio > r.limit:
            yield f"{where} takes {r.min_ratio:.2f} x native, the target is <= {r.limit:.2f} x"
        if r.new_plans or r.new_views:
            yield f"{where} made {r.new_plans} plans and {r.new_views} views in the steady state"


def table(workload: Workload, results: Sequence[Result]) -> Table:
    elements = sum(torch.Size(shape).numel() for shape in workload.shapes)
    title = f"{workload.name}: {len(workload.shapes)} tensors, {elements:,} parameters"
    drawn = Table(title=title, box=box.MARKDOWN)
    columns = "min ms|median ms|CPU median ms|x native (min)|x native (median)|target|copies"
    for column in ("implementation", "step", *columns.split("|"), "plans (new)", "new views"):
        drawn.add_column(column, justify="left" if len(drawn.columns) < 2 else "right")
    for r in results:
        times = (f"{value:.2f}" for value in (r.min_ms, r.median_ms, r.cpu_median_ms))
        ratios = (f"{r.min_ratio:.2f}", f"{r.median_ratio:.2f}")
        limit = "" if r.limit is None else f"<= {r.limit:.2f}"
        counts = ("", "", "")
        if r.copies_in is not None:
            copies = f"{r.copies_in:g} + {r.copies_out:g}"
            counts = (copies, f"{r.plans} ({r.new_plans})", f"{r.new_views}")
        drawn.add_row(r.implementation, r.contender, *times, *ratios, limit, *counts)
    return drawn


def machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    return {
        "platform": platform.platform(),
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the host-side cost of a swapped step.")
    parser.add_argument("--repeats", type=int, default=25, help="measured steps of each contender")
    parser.add_argument("--warmup", type=int, default=3, help="steps before")
    parser.add_argument("--threads", type=int, default=1, help="of torch's operators (default 1)")
    parser.add_argument("--quick", action="store_true", help="5 repeats")
    help_only = "rows with all of these words, such as: --only one-element/plain fused"
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=help_only)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    repeats = 5 if args.quick else args.repeats
    console = Console()
    if not console.is_terminal:
        console.width = 150
    here = machine()
    console.print(", ".join(f"{key} {value}" for key, value in here.items()))
    results: list[Result] = []
    for workload in WORKLOADS:
        rows = [
            row
            for name in IMPLEMENTATIONS
            if all(word in f"{workload.name} {name}" for word in args.only)
            for row in measure_row(workload, name, args.warmup, repeats)
        ]
        if rows:
            console.print(table(workload, rows))
        results += rows
    if dist.is_initialized():
        dist.destroy_process_group()
    if args.json:
        settings = {**CONFIG, "repeats": repeats, "warmup": args.warmup}
        content = {"machine": here, "settings": settings, "results": list(map(asdict, results))}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    missed = list(failures(results))
    for line in missed:
        print(line)
    if args.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
