# SPDX-License-Identifier: Apache-2.0
"""Forecast swapping for models that no machine here could hold.

    python benchmarks/scale.py                          # tables
    python benchmarks/scale.py --write docs/scale.md docs/zh/scale.md    # puts them there

Shapes are those of the published models; each parameter is cut as its sharding cuts it, and what
one device is left with goes through ``swap_core.forecast``: the real partition and pipeline on a
virtual clock. Nothing is measured, so the output is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path

from swap_core import PRESETS, Forecast, Workload, forecast, format_bytes, recommended

SWAP_TIMES = (4, 8, 16, 32, 64, 128)
STATE = 8
"""Bytes per parameter: two states in fp32."""
TOUCHED = 2 + 3 * 4 / STATE
"""Bytes of device memory per byte of state: states and parameters are read and written, gradients
are read."""
NODE = 8
"""Devices."""
MARKS = ("<!-- from here on: benchmarks/scale.py -->", "<!-- until here -->")


@dataclass(frozen=True)
class Tensor:
    """A parameter and over how many devices it is cut, along its first dimension."""

    shape: tuple[int, ...]
    shards: int
    count: int = 1
    """How many such parameters a device has a part of."""

    @property
    def local(self) -> int:
        """Elements on the device that has most."""
        return ceil(self.shape[0] / self.shards) * prod(self.shape[1:])


@dataclass(frozen=True)
class Case:
    """A training."""

    name: str
    devices: int
    layout: str
    parameters: float
    tensors: tuple[Tensor, ...]
    """Of the device that has most."""
    step_seconds: float
    """Of a training step natively."""
    step_from: str

    def sizes(self) -> tuple[int, ...]:
        """Bytes of states of each parameter on one device."""
        return tuple(STATE * t.local for t in self.tensors for _ in range(t.count))


def dense(
    width: int, hidden: int, keys: int, words: int, layers: int, shards: int
) -> Iterator[Tensor]:
    """A decoder of the Llama family, all of it cut over ``shards`` devices."""
    yield Tensor((words, width), shards, 2)
    yield Tensor((width,), shards, 2 * layers + 1)
    yield Tensor((width, width), shards, 2 * layers)
    yield Tensor((keys, width), shards, 2 * layers)
    yield Tensor((hidden, width), shards, 2 * layers)
    yield Tensor((width, hidden), shards, layers)


def mixture(layers: int, devices: int, experts: int, replicas: int) -> Iterator[Tensor]:
    """Layers of DeepSeek-V3: attention and shared expert over all devices, experts over replicas.

    Args:
        layers: On a device's pipeline stage.
        devices: Of the stage.
        experts: On a device, of 256.
        replicas: Devices that have the same experts and cut them among themselves.
    """
    width, heads, hidden = 7168, 128, 2048
    yield Tensor((width,), devices, 2 * layers)
    yield Tensor((1536, width), devices, layers)
    yield Tensor((heads * (128 + 64), 1536), devices, layers)
    yield Tensor((512 + 64, width), devices, layers)
    yield Tensor((heads * (128 + 128), 512), devices, layers)
    yield Tensor((width, heads * 128), devices, layers)
    yield Tensor((1536,), devices, layers)
    yield Tensor((512,), devices, layers)
    yield Tensor((256, width), devices, layers)
    yield Tensor((hidden, width), devices, 2 * layers)
    yield Tensor((width, hidden), devices, layers)
    yield Tensor((experts, hidden, width), replicas, 2 * layers)
    yield Tensor((experts, width, hidden), replicas, layers)


def deepseek_parameters() -> float:
    """Of the whole model, from the shapes above: 61 layers, of which 3 are dense."""
    experts = sum(prod(t.shape) * t.count for t in mixture(1, 1, 256, 1))
    ffn = 3 * 7168 * (256 + 1) * 2048 + 256 * 7168
    return 2 * 129_280 * 7168 + 58 * experts + 3 * (experts - ffn + 3 * 7168 * 18_432) + 7168


def arithmetic(parameters: float, tokens: int) -> float:
    """Seconds of a step: 6 operations per parameter and token at 40 % of an H100's 989 TFLOP/s."""
    return 6 * parameters * tokens / (0.4 * 989e12)


TOKENS = 16_384
"""Per device and step, for the dense models."""
ASSUMED = f"{TOKENS:,} tokens per device, 40 % of 989 TFLOP/s"
CASES = (
    Case(
        "Llama 2 7B", 8, "FSDP2 over 8", 6.74e9,
        tuple(dense(4096, 11_008, 4096, 32_000, 32, 8)),
        arithmetic(6.74e9, TOKENS), ASSUMED,
    ),
    Case(
        "Llama 2 70B", 64, "FSDP2 over 64", 69e9,
        tuple(dense(8192, 28_672, 1024, 32_000, 80, 64)),
        arithmetic(69e9, TOKENS), ASSUMED,
    ),
    Case(
        "Llama 3 405B", 1024, "FSDP2 over 1,024", 405e9,
        tuple(dense(16_384, 53_248, 1024, 128_256, 126, 1024)),
        arithmetic(405e9, TOKENS), ASSUMED,
    ),
    Case(
        "DeepSeek-V3 671B", 2048,
        "pipeline 16 (4 layers), experts over 64 (4 each, cut over 2), the rest over 128",
        deepseek_parameters(),
        tuple(mixture(4, 128, 4, 2)),
        # 180,000 H800 hours per 10^12 tokens; batches of 15,360 sequences of 4,096.
        180e3 * 3600 * (15_360 * 4096 / 1e12) / 2048, "its report: arXiv 2412.19437",
    ),
)  # fmt: skip


def check_parameters() -> None:
    """The shapes must add up to the model's size, or the tables are of something else."""
    for case in CASES:
        total = sum(prod(t.shape) * t.count for t in case.tensors)
        if case.layout.startswith("FSDP2") and abs(total / case.parameters - 1) > 0.01:
            sys.exit(
                f"{case.name}: the shapes have {total:,} parameters, not {case.parameters:,.0f}"
            )


def forecasts(case: Case, preset: str) -> list[Forecast]:
    workload = Workload(case.sizes(), TOUCHED)
    return [forecast(workload, PRESETS[preset].hardware, times) for times in SWAP_TIMES]


def lines(presets: Sequence[str]) -> Iterator[str]:
    yield from models()
    for preset in presets:
        yield from on(preset)


def models() -> Iterator[str]:
    yield "| model | devices | layout | parameters | on one device | its states | host, per node |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for case in CASES:
        state = sum(case.sizes())
        told = (
            case.name, f"{case.devices:,}", case.layout, f"{case.parameters / 1e9:,.1f} B",
            f"{state / STATE / 1e9:.3f} B in {len(case.sizes())} tensors",
            format_bytes(state), format_bytes(NODE * state),
        )  # fmt: skip
        yield f"| {' | '.join(told)} |"
    yield ""


def on(preset: str) -> Iterator[str]:
    yield f"## {preset}"
    yield ""
    yield f"{PRESETS[preset].source}."
    yield ""
    times = " | ".join(f"{n} batches" for n in SWAP_TIMES)
    yield f"| update, ms | {times} | floor | native | recommended | its peak | of a step |"
    yield f"| --- |{' --- |' * (len(SWAP_TIMES) + 5)}"
    for case in CASES:
        told = forecasts(case, preset)
        best = recommended(told)
        cells = [
            case.name,
            *(f"{1e3 * each.update_seconds:,.0f}" for each in told),
            f"{1e3 * best.floor_seconds:,.0f}",
            f"{1e3 * best.native_seconds:,.1f}",
            f"swap_times={best.swap_times}",
            format_bytes(best.peak_bytes),
            f"{100 * best.added_seconds / case.step_seconds:.1f} % of {case.step_seconds:.1f} s",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def write(file: Path, text: str) -> None:
    """Replace what is between the marks."""
    before, _, rest = file.read_text().partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        sys.exit(f"{file} lacks {MARKS[0]!r} or {MARKS[1]!r}")
    file.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--preset", nargs="+", choices=PRESETS, default=["h100-sxm", "atlas-800t-a2"]
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="documents with marks for it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    args = parser.parse_args()
    check_parameters()
    text = "\n".join(lines(args.preset))
    print(text)
    for document in args.write:
        write(document, text)
    if args.json is not None:
        results = {
            preset: {
                case.name: [asdict(each) for each in forecasts(case, preset)] for case in CASES
            }
            for preset in args.preset
        }
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
