# SPDX-License-Identifier: Apache-2.0
"""Compare with what else keeps optimizer states off the device, on the device at hand.

    python benchmarks/peers.py                       # the accelerator that is there, or the CPU
    python benchmarks/peers.py --device sim          # the simulated accelerator

Each runs in a process of its own, gets the same parameters and gradients, and is compared with
torch's fused AdamW bit by bit. What cannot run here is listed with the reason that it gave.
``pip install torchao deepspeed torchtitan-npu`` gives the peers; none of them is needed.

On the CPU, swapping uses CPU tensors in the role of device memory: its times then say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import torch

from swap_testkit.torch import CpuAsDevice
from swap_testkit.torch.simulator.role import SIMULATED, device_type
from swap_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SECONDS = 300
"""A peer that builds a kernel on first use takes minutes."""


class Stepper(Protocol):
    """All that a peer needs to be."""

    def step(self) -> object: ...


Params: TypeAlias = list[torch.nn.Parameter]
Make: TypeAlias = Callable[[Params], Stepper]


def native(params: Params) -> Stepper:
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def foreach(params: Params) -> Stepper:
    return torch.optim.AdamW(params, foreach=True, **OPTIONS)


def swapped(params: Params, *, packed: bool = True) -> Stepper:
    device: Any = CpuAsDevice() if params[0].device.type == "cpu" else None
    config = SwapOptimizerConfig(packed_swap=packed)
    return swap_optimizer(torch.optim.AdamW(params, fused=True, **OPTIONS), config, device=device)


def swapped_per_tensor(params: Params) -> Stepper:
    return swapped(params, packed=False)


def torchao(params: Params) -> Stepper:
    """Updates on the CPU, with gradients that hooks bring there."""
    module = importlib.import_module("torchao.optim")
    stepper: Stepper = module.CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True, **OPTIONS)
    return stepper


class DeepSpeed:
    """DeepSpeed's CPU Adam between the two copies that ZeRO-Offload makes."""

    def __init__(self, params: Params) -> None:
        module = importlib.import_module("deepspeed.ops.adam")
        self.params = params
        self.on_host = [torch.nn.Parameter(p.detach().cpu().clone()) for p in params]
        self.inner = module.DeepSpeedCPUAdam(self.on_host, adamw_mode=True, **OPTIONS)

    @torch.no_grad()
    def step(self) -> None:
        for there, here in zip(self.params, self.on_host, strict=True):
            assert there.grad is not None
            here.grad = there.grad.cpu()
        self.inner.step()
        for there, here in zip(self.params, self.on_host, strict=True):
            there.copy_(here)


def torchtitan_npu(params: Params) -> Stepper:
    """Its step replaces that of torch's AdamW; it is made for torch_npu."""
    importlib.import_module("torchtitan_npu.patches.optimizer.swap_optimizer")
    raise NotImplementedError(
        "it imports, but runs only inside torchtitan's trainer on an Ascend card: compare there"
    )


CASES: dict[str, tuple[Make, str | None]] = {
    "torch AdamW, fused": (native, "torch"),
    "torch AdamW, foreach": (foreach, "torch"),
    "swap_torch, packed": (swapped, "swap-torch"),
    "swap_torch, per tensor": (swapped_per_tensor, "swap-torch"),
    "torchao CPUOffloadOptimizer": (torchao, "torchao"),
    "DeepSpeed CPU Adam": (DeepSpeed, "deepspeed"),
    "torchtitan-npu swap optimizer": (torchtitan_npu, "torchtitan-npu"),
}
PEERS = ("torchao", "deepspeed", "torchtitan-npu")
"""Distributions that are not needed."""


# One case, in a process of its own.


def run_case(args: argparse.Namespace) -> dict[str, Any]:
    """Make, step and measure; or tell why not."""
    make, distribution = CASES[args.case]
    told: dict[str, Any] = {"version": _version(distribution)}
    kind = device_type(args.device)
    try:
        params = parameters(args, kind)
        stepper = make(params)
        return told | {"runs": True} | measured(params, stepper, args, kind)
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is what is reported
        return told | {"runs": False, "reason": f"{type(error).__name__}: {error}"[:300]}


def _version(distribution: str | None) -> str | None:
    try:
        return version(distribution) if distribution else None
    except PackageNotFoundError:
        return None


def parameters(args: argparse.Namespace, kind: str) -> Params:
    generator = torch.Generator(drawn_on(args, kind)).manual_seed(0)
    values = (drawn(args.numel, generator) * 0.02 for _ in range(args.tensors))
    return [torch.nn.Parameter(value.to(kind)) for value in values]


def drawn_on(args: argparse.Namespace, kind: str) -> str:
    """Cards draw numbers themselves, a hundred times as fast; all cases are on the same one."""
    return "cpu" if args.device == SIMULATED else kind


def drawn(numel: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(numel, generator=generator, device=generator.device)


def measured(
    params: Params, stepper: Stepper, args: argparse.Namespace, kind: str
) -> dict[str, Any]:
    wait, memory = meters(kind)
    seconds, peaks = [], []
    for step in range(args.steps):
        backward(params, step, drawn_on(args, kind))
        wait()
        before = memory("reset_peak_memory_stats", "memory_allocated")
        start = perf_counter()
        stepper.step()
        wait()
        seconds.append(perf_counter() - start)
        peaks.append(memory(None, "max_memory_allocated") - before)
        for param in params:
            param.grad = None
    idle = memory(None, "memory_allocated") - sum(p.nbytes for p in params)
    if args.values is not None:
        torch.save([param.detach().cpu() for param in params], args.values)
    report = stepper.swap_report() if isinstance(stepper, TorchSwapOptimizer) else None
    return {
        "step_ms": 1e3 * min(seconds[1:]),
        "step_ms_median": 1e3 * median(seconds[1:]),
        # On the CPU there is no counter of the device's memory but our own.
        "idle_bytes": idle if kind != "cpu" else report and report.idle_device_bytes,
        # In the first step native makes its states.
        "peak_bytes": max(peaks[1:]) if kind != "cpu" else report and report.peak_device_bytes,
        "host_bytes": report and report.host_bytes,
    }


def backward(params: Params, step: int, where: str) -> None:
    """Gradients by autograd, because some peers hook it. The same in every process."""
    generator = torch.Generator(where).manual_seed(1000 + step)
    for param in params:
        grad = drawn(param.numel(), generator).to(param.device)
        param.backward(grad)  # type: ignore[no-untyped-call]  # torch


def meters(kind: str) -> tuple[Callable[[], None], Callable[[str | None, str], int]]:
    """How to wait for the device, and how to ask for its memory."""
    if kind == "cpu":
        return lambda: None, lambda reset, name: 0

    def memory(reset: str | None, name: str) -> int:
        if reset is not None:
            getattr(torch.accelerator, reset)()
        return int(getattr(torch.accelerator, name)())

    return torch.accelerator.synchronize, memory


# All cases.


def run_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each result as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder:
        expected: list[torch.Tensor] | None = None
        for number, name in enumerate(CASES):
            if args.only and not any(name.startswith(word) for word in args.only):
                continue
            values = Path(folder) / f"{number}.pt"
            result = {"name": name, **in_process(name, values, args)}
            if result["runs"]:
                found = torch.load(values)
                expected = expected if expected is not None else found
                result |= compared(found, expected)
            yield result


def in_process(name: str, values: Path, args: argparse.Namespace) -> dict[str, Any]:
    _, distribution = CASES[name]
    if distribution in PEERS and _version(distribution) is None:
        return {"runs": False, "reason": "not installed"}
    sizes = (f"--{key}={getattr(args, key)}" for key in ("device", "tensors", "numel", "steps"))
    command = [sys.executable, __file__, "--case", name, "--values", str(values), *sizes]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"runs": False, "reason": f"it took more than {args.seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.splitlines() or ["no message"])[-1]
        return {"runs": False, "reason": f"exit code {done.returncode}: {last}"[:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def compared(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> dict[str, Any]:
    pairs = list(zip(found, expected, strict=True))
    return {
        "equal_bits": all(torch.equal(one, other) for one, other in pairs),
        "largest_difference": max(float((one - other).abs().max()) for one, other in pairs),
    }


def rows(results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for each in results:
        name = f"{each['name']} {each.get('version') or ''}".strip()
        if not each["runs"]:
            yield [name, "cannot run here", "", "", "", each["reason"]]
            continue
        told = "equal" if each["equal_bits"] else f"off by {each['largest_difference']:.1e}"
        sizes = ("-" if n is None else f"{n / 2**20:.1f}" for n in memory_of(each))
        yield [name, f"{each['step_ms']:.2f}", *sizes, told]


def memory_of(result: dict[str, Any]) -> tuple[int | None, ...]:
    return result["idle_bytes"], result["peak_bytes"], result["host_bytes"]


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default=default_device(), help=f"or cpu, or {SIMULATED}")
    parser.add_argument("--tensors", type=int, default=32, help="parameters (32)")
    parser.add_argument("--numel", type=int, default=262_144, help="elements of each (262144)")
    parser.add_argument("--steps", type=int, default=6, help="updates; all but the first count (6)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each (300)")
    parser.add_argument("--only", nargs="+", help="cases that begin so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--values", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.case is not None:
        print(json.dumps(run_case(args)))
        return
    from bench_common import console, table, write_json

    results = list(run_all(args))
    columns = ("", "step ms", "idle MiB", "peak MiB", "host MiB", "parameters against native")
    title = f"{args.tensors} x {args.numel} fp32 parameters on {args.device}, {args.steps} steps"
    console().print(table(title, columns, list(rows(results))))
    kept = {key: getattr(args, key) for key in ("device", "tensors", "numel", "steps")}
    write_json(args.json, {"arguments": kept, "results": results})
    ours = [r for r in results if r["name"].startswith("swap_torch")]
    sys.exit(0 if all(r["runs"] and r["equal_bits"] for r in ours) else 1)


if __name__ == "__main__":
    main()
