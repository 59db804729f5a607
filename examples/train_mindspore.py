# SPDX-License-Identifier: Apache-2.0
"""Train a small language model twice from one seed, natively and swapped, with MindSpore.

The exit code is 1 if one bit of a loss, a parameter or a state differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn
from rich.console import Console

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Alignment
from swap_testkit.array import Tolerance
from swap_testkit.mindspore import Job
from swap_testkit.mindspore.align import align_job
from swap_testkit.mindspore.model import (
    LanguageModel,
    ModelShape,
    lm_loss,
    text_batch,
    unit_initialised,
)
from swap_testkit.report import alignment_table

OPTIMIZERS = {
    "adam": lambda params: nn.Adam(params, 2e-3),
    "adam-weight-decay": lambda params: nn.AdamWeightDecay(params, 2e-3, weight_decay=0.01),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=60, help="training steps of each run")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--width", type=int, default=64, help="of the model, a multiple of 4")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="of mindspore.nn")
    add("--swap-times", type=int, default=16, help="batches in which an update streams states")
    add("--plot", type=Path, default=Path("train_mindspore.png"), help="the picture")
    options = parser.parse_args()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    shape = ModelShape(options.layers, options.width, heads=4, hidden=4 * options.width)

    def build(seed: int) -> Job:
        net = unit_initialised(LanguageModel(shape), seed)
        return Job(net, OPTIMIZERS[options.optimizer], text, loss)

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 110  # not the 80 that rich assumes
    target = ms.get_context("device_target")
    console.print(f"MindSpore {ms.__version__} on {target}; {options.steps} steps, twice ...")
    (alignment,) = align_job(
        build,
        steps=options.steps,
        configs=[SwapOptimizerConfig(swap_times=options.swap_times)],
        seed=0,
        device=target.lower(),
        tolerance=Tolerance(),
    )
    console.print(alignment_table([alignment]))
    console.print(alignment.explain())
    first, last = alignment.losses[0][0], alignment.losses[-1][0]
    console.print(f"Loss {first:.4f} to {last:.4f} nats per byte.")
    draw(alignment, f"Small language model, {options.optimizer}, on {target}", options.plot)
    console.print(f"Picture: {options.plot}")
    return 0 if alignment.aligned else 1


def text(step: int) -> tuple[Tensor, Tensor]:
    return text_batch(step, batch=16, length=64)


def loss(net: nn.Cell, batch: tuple[Tensor, Tensor]) -> Tensor:
    return lm_loss(net(batch[0]), batch[1])


def draw(alignment: Alignment, title: str, file: Path) -> None:
    """Loss curves, one on the other, and the bytes of states on the device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    losses, memory = figure.subplots(1, 2)
    native, swapped = zip(*alignment.losses, strict=True)
    steps = range(1, len(native) + 1)
    losses.plot(steps, native, color="tab:orange", linewidth=4, label="native")
    losses.plot(steps, swapped, "--", color="tab:blue", linewidth=1.5, label="swapped")
    losses.set(title="Training loss", xlabel="step", ylabel="cross entropy (nats per byte)")
    losses.legend()
    bars = {
        "native, always": alignment.native_memory.idle,
        "swapped, at most": alignment.swapped_memory.peak,
        "swapped, between updates": alignment.swapped_memory.idle,
    }
    shown = memory.bar(list(bars), [nbytes / 1024 for nbytes in bars.values()])
    memory.bar_label(shown, fmt="%.0f")
    memory.set(title="Optimizer states on the device", ylabel="KiB")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
