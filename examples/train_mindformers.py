# SPDX-License-Identifier: Apache-2.0
"""Train a small language model with MindFormers' AdamW, natively and swapped in three ways.

Weights are bf16, so the optimizer has fp32 master parameters. The exit code is 1 if one bit of a
loss, a parameter, a master or a moment differs.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn
from rich.console import Console
from rich.table import Table

from swap_core import SwapOptimizerConfig, format_bytes
from swap_testkit.array import Tolerance
from swap_testkit.mindspore import Job
from swap_testkit.mindspore.align import outcomes_of
from swap_testkit.mindspore.copies import CopyTrainer
from swap_testkit.mindspore.mindformers import adamw_module
from swap_testkit.mindspore.model import (
    LanguageModel,
    ModelShape,
    lm_loss,
    text_batch,
    unit_initialised,
)
from swap_testkit.mindspore.record import wrapper
from swap_testkit.mindspore.world import ALONE
from swap_testkit.outcome import RankOutcome

WAYS = {
    "packed, masters in": (True, True),
    "packed, masters out": (True, False),
    "per tensor, masters in": (False, True),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=15, help="training steps of each run")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--width", type=int, default=64, help="of the model, a multiple of 4")
    add("--swap-times", type=int, default=16, help="batches in which an update streams states")
    add("--folder", type=Path, help="of the package mindformers, if it is not installed")
    add("--plot", type=Path, default=Path("train_mindformers.png"), help="the picture")
    options = parser.parse_args()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    on_card = ms.get_context("device_target") == "Ascend"
    # On a machine for training MindFormers is imported; elsewhere that file of it runs alone.
    module = (
        import_module("mindformers.pynative.optimizer.adamw")
        if on_card
        else adamw_module(options.folder)
    )
    adamw = partial(module.AdamW, learning_rate=2e-3, weight_decay=0.01)
    shape = ModelShape(options.layers, options.width, heads=4, hidden=4 * options.width)

    def make() -> CopyTrainer:
        net = unit_initialised(LanguageModel(shape), seed=0)
        job = Job(net, adamw, text, loss)
        return CopyTrainer(job, lambda param: ms.bfloat16, ALONE, sharded=False)

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 110  # not the 80 that rich assumes
    console.print(f"{module.__file__}\n{options.steps} steps, natively and in {len(WAYS)} ways ...")
    configs = [
        SwapOptimizerConfig(
            swap_times=options.swap_times, packed_swap=packed, include_master_params=masters
        )
        for packed, masters in WAYS.values()
    ]
    outcomes = outcomes_of(make, list(map(wrapper, configs)), options.steps, 0, Tolerance())
    console.print(table(outcomes))
    first, last = outcomes[0].losses[0][0], outcomes[0].losses[-1][0]
    console.print(f"Loss {first:.4f} to {last:.4f} nats per byte.")
    draw(outcomes, options.plot)
    console.print(f"Picture: {options.plot}")
    return 1 if any(outcome.mismatches for outcome in outcomes) else 0


def text(step: int) -> tuple[Tensor, Tensor]:
    return text_batch(step, batch=8, length=32)


def loss(net: nn.Cell, batch: tuple[Tensor, Tensor]) -> Tensor:
    return lm_loss(net(batch[0]), batch[1])


def table(outcomes: list[RankOutcome]) -> Table:
    """One row for native and one for each way."""
    shown = Table(title="MindFormers AdamW: moments and fp32 masters")
    for column in ("", "bits", "idle", "peak", "host", "update"):
        shown.add_column(column, justify="left" if column in ("", "bits") else "right")
    native = outcomes[0]
    memory = native.native_memory
    milliseconds = f"{native.native_step_seconds * 1e3:.1f} ms"
    shown.add_row("native", "", *map(format_bytes, (memory.idle, memory.peak, 0)), milliseconds)
    for way, outcome in zip(WAYS, outcomes, strict=True):
        memory = outcome.swapped_memory
        bits = "equal" if not outcome.mismatches else str(outcome.mismatches[0])
        numbers = map(format_bytes, (memory.idle, memory.peak, memory.host))
        shown.add_row(way, bits, *numbers, f"{outcome.swapped_step_seconds * 1e3:.1f} ms")
    return shown


def draw(outcomes: list[RankOutcome], file: Path) -> None:
    """Loss curves, one on the other, and the bytes of moments and masters on the device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    losses, memory = figure.subplots(1, 2)
    native, swapped = zip(*outcomes[0].losses, strict=True)
    steps = range(1, len(native) + 1)
    losses.plot(steps, native, color="tab:orange", linewidth=4, label="native")
    losses.plot(steps, swapped, "--", color="tab:blue", linewidth=1.5, label=next(iter(WAYS)))
    losses.set(title="Training loss", xlabel="step", ylabel="cross entropy (nats per byte)")
    losses.legend()
    peaks = [outcomes[0].native_memory.peak, *(each.swapped_memory.peak for each in outcomes)]
    idles = [outcomes[0].native_memory.idle, *(each.swapped_memory.idle for each in outcomes)]
    names = ["native", *(way.replace(", ", ",\n") for way in WAYS)]
    memory.bar(names, [peak / 1024 for peak in peaks], color="tab:blue", label="at most")
    memory.bar(names, [idle / 1024 for idle in idles], color="tab:orange", label="between updates")
    memory.set(title="Moments and masters on the device", ylabel="KiB")
    memory.legend()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
