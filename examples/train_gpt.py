# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT twice from one seed, natively and with swapped optimizer, and compare.

The exit code is 1 if one bit of a loss, a parameter or a state differs, or if the simulated
accelerator finds accesses of the same memory in no order.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from _compare import all_equal, table_of
from _gpt import BATCH, CONTEXT, GPT, HEAD, TEXT_FILES, batches, read_text
from _measure import MemoryRecorder, Run, allocator_bytes, now
from _picture import draw
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch.nn.attention import SDPBackend, sdpa_kernel

from swap_core import format_bytes
from swap_testkit.torch import CpuAsDevice, simulator
from swap_torch import (
    AcceleratorDevice,
    SwapOptimizerConfig,
    TorchSwapDevice,
    TorchSwapOptimizer,
    swap_optimizer,
)

SEED = 0
LEARNING_RATE = 2e-3
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
SIMULATED = "simnpu"
PICTURES = (".pdf", ".png", ".svg")

Device: TypeAlias = TorchSwapDevice[Any, Any]
Tell: TypeAlias = Callable[[int, str], None]


def main(arguments: list[str] | None = None) -> int:
    options, device, text = inputs_from(arguments)
    config = SwapOptimizerConfig(
        swap_times=options.swap_times, packed_swap=False if options.per_tensor else None
    )
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 110  # not the 80 that rich assumes
    console.print(
        f"Text    {len(TEXT_FILES)} source files of Python's standard library ({TEXT_FILES[0]} to "
        f"{TEXT_FILES[-1]}), {len(text):,} bytes"
    )
    console.print(f"Device  {told(device)}")

    make_deterministic()
    runs = []
    for name, its_config in (("native", None), ("swapped", config)):
        with live(console, name, options.steps) as tell, sdpa_kernel(SDPBackend.MATH):
            runs.append(train(name, options, device, its_config, text, tell))
    native, swapped = runs

    console.print(table_of(native, swapped, simulated=is_simulated(device)))
    console.print(f"The optimizer's own report: {swapped.report}")
    how = "state by state" if options.per_tensor else "packed"
    title = f"Small GPT, {options.optimizer}: native and swapped ({how}) on {device.torch_device}"
    draw(native, swapped, title, options.plot)
    console.print(f"Picture: {options.plot}")
    return 0 if all_equal(native, swapped) and no_races(console) else 1


def no_races(console: Console) -> bool:
    """Tell what the simulator's checker found, if there is a simulator."""
    if simulator.enabled_name() is None:
        return True
    races = simulator.races()
    for race in races:
        console.print(f"Race: {race}")
    console.print(f"Accesses of the same memory in no order: {len(races)}")
    return not races


# The command line.


def inputs_from(
    arguments: list[str] | None,
) -> tuple[argparse.Namespace, Device, torch.Tensor]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=whole, default=120, help="training steps of each run")
    add("--layers", type=whole, default=4, help="transformer blocks")
    add("--width", type=width, default=128, help=f"of the model, a multiple of {HEAD}")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="of torch.optim")
    add("--swap-times", type=whole, default=16, help="batches in which an update streams states")
    add("--per-tensor", action="store_true", help="move state by state, not in packed batches")
    add(
        "--device",
        choices=("auto", "npu", "cuda", "sim", "cpu"),
        default="auto",
        help="sim: a simulated accelerator (needs a C++ compiler); cpu: CPU tensors in the role of "
        "device memory; auto: the first of accelerator, sim and cpu that is there",
    )
    add("--plot", type=picture_file, default="train_gpt.png", metavar="FILE", help="the picture")
    options = parser.parse_args(arguments)
    try:
        return options, find_device(options.device), read_text()
    except (LookupError, FileNotFoundError) as problem:
        parser.error(str(problem))


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a whole number >= 1")
    return int(text)


def width(text: str) -> int:
    if whole(text) % HEAD:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; give a multiple of {HEAD}, the width of an attention head"
        )
    return int(text)


def picture_file(text: str) -> Path:
    file = Path(text)
    if file.suffix.lower() not in PICTURES:
        problem = f"give the name of a picture, which ends in {', '.join(PICTURES)}"
    elif not file.parent.is_dir():
        problem = f"there is no folder {file.parent}; make it, or name a file in one that exists"
    else:
        try:
            new = not file.exists()
            file.open("ab").close()
            if new:
                file.unlink()
            return file
        except OSError as error:
            problem = f"it cannot be written ({error.strerror}); name a file elsewhere"
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted: {problem}")


def find_device(wanted: str) -> Device:
    """Give the device on which states swap.

    Raises:
        LookupError: it is not there.
    """
    if wanted == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            raise LookupError(
                f"--device npu needs torch_npu, which cannot be imported ({error}); install CANN "
                f"and torch_npu, or choose auto or cpu"
            ) from error
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "sim" or (wanted == "auto" and found is None):
        try:
            return simulated_device()
        except simulator.BuildError as error:
            if wanted == "sim":
                raise LookupError(str(error)) from error
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return CpuAsDevice()
    if found is None or wanted not in ("auto", found.type):
        raise LookupError(
            f"--device {wanted} is not there: torch {torch.__version__} finds "
            f"{found.type if found else 'no accelerator'} on this machine; choose auto or cpu, or "
            f"install a driver and a build of torch for {wanted}"
        )
    return AcceleratorDevice(torch.device(found.type, torch.accelerator.current_device_index()))


def simulated_device() -> Device:
    """Enable the simulator; compiled at first use.

    Raises:
        BuildError: it cannot be compiled here.
    """
    simulator.enable(SIMULATED, devices=1)
    return AcceleratorDevice(torch.device(SIMULATED, 0))


def told(device: Device) -> str:
    if is_simulated(device):
        return (
            "a simulated accelerator: shows that bits are equal, what its allocator counts, that "
            "copies and updates wait for each other where they must; nothing about speed"
        )
    if device.torch_device.type == "cpu":
        return (
            "the CPU in the role of an accelerator: shows that bits are equal, that memory is "
            "really freed and how much moves; shows nothing about speed"
        )
    return f"{device.torch_device}: bits, memory and times are its own"


def is_simulated(device: Device) -> bool:
    """Whether there is no real link between host and device memory."""
    return device.torch_device.type in ("cpu", SIMULATED)


# Training.


def make_deterministic() -> None:
    """Let two native runs give the same bits, so that a difference is the swapping's."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)


def train(
    name: str,
    options: argparse.Namespace,
    inner: Device,
    config: SwapOptimizerConfig | None,
    text: torch.Tensor,
    tell: Tell,
) -> Run:
    """Train from the seed; with a config, swapped."""
    torch.manual_seed(SEED)
    device = inner.torch_device
    recorder = MemoryRecorder(inner)
    model = GPT(options.layers, options.width).to(device)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), lr=LEARNING_RATE)
    if config is not None:
        optimizer = swap_optimizer(optimizer, config, device=recorder)
    allocator_bytes(device)  # its peak counts from here

    run = Run(name)
    begun = now(device)
    for step, sample in enumerate(batches(text, options.steps, SEED), start=1):
        start = now(device)
        loss = model.loss(sample.to(device))
        forward_end = now(device)
        loss.backward()  # type: ignore[no-untyped-call]
        backward_end = now(device)
        recorder.begin_update()
        optimizer.step()
        end = now(device)
        optimizer.zero_grad()

        run.last_step = recorder.timeline
        run.last_step.phases = (start, forward_end, backward_end, end)
        run.last_step.stay = stay = recorder.staying(optimizer)
        run.losses[f"step {step}"] = on_cpu(loss)
        run.step_times.append(end - backward_end)
        run.idle = max(run.idle, stay + recorder.held)
        run.peak = max(run.peak, stay + recorder.peak)
        tokens_per_second = step * BATCH * CONTEXT / (end - begun)
        tell(
            step,
            f"loss {loss.item():.3f}  {tokens_per_second:,.0f} tok/s  "
            f"optimizer holds {format_bytes(run.idle)}, peak {format_bytes(run.peak)}",
        )

    run.allocator = allocator_bytes(device)
    collect(run, model, optimizer)
    return run


def collect(run: Run, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Copy what the training ended with to the CPU."""
    run.parameters = {name: on_cpu(param) for name, param in model.named_parameters()}
    names = list(run.parameters)
    run.states = {
        f"{key} of {names[index]}": on_cpu(value)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    if isinstance(optimizer, TorchSwapOptimizer):
        report = optimizer.swap_report()
        run.host, run.report = report.host_bytes, str(report)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def live(console: Console, name: str, steps: int) -> Iterator[Tell]:
    """Show progress: a bar on a terminal, elsewhere a line now and then."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=20)] if console.width >= 105 else []),
            TextColumn("{task.completed}/{task.total} {task.fields[line]}"),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(name, total=steps, line="")
            yield lambda step, line: progress.update(task, completed=step, line=line)
    else:
        shown = {1, steps, *range(0, steps, max(1, steps // 8))}

        def tell(step: int, line: str) -> None:
            if step in shown:
                console.print(f"{name:<7} {step:>4}/{steps}  {line}")

        yield tell


if __name__ == "__main__":
    sys.exit(main())
