# SPDX-License-Identifier: Apache-2.0
"""Trainings that are run natively and swapped, and resumed from each other's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

SWAP_TIMES = "4"


@dataclass(frozen=True)
class Scenario:
    """A training of six steps with a checkpoint after three."""

    name: str
    nproc: int = 1
    config: str = "llama3"
    arguments: tuple[str, ...] = ()
    resume_arguments: tuple[str, ...] | None = None
    """Where they are not ``arguments``: it is resumed with another parallelism."""
    swap_arguments: tuple[str, ...] = ()
    """How it swaps, besides in four batches."""
    needs: tuple[int, int] = (2, 13)
    """The first version of torch on which torchtitan 0.3.0 trains so."""
    devices: tuple[str, ...] = ("cpu", "sim", "cuda")
    """Where it can run."""

    @property
    def key(self) -> str:
        """The name for folders."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


def _spmd(backend: str) -> tuple[str, ...]:
    return ("--parallelism.spmd-backend", backend)


def _degree(kind: str) -> tuple[str, ...]:
    return (f"--parallelism.{kind}-parallel-degree", "2")


_PIPELINE = ("--parallelism.pipeline-parallel-schedule",)
_PARTIAL = _spmd("partial_dtensor")
_IMPLEMENTATION = "--optimizer.implementation"
_SWAP = "--optimizer.swap-optimizer"
_ASYNC = "--checkpoint.async-mode"

SCENARIOS = (
    Scenario("AdamW, fused"),
    Scenario("AdamW, for-loop", arguments=(_IMPLEMENTATION, "for-loop")),
    Scenario("Adam, for-loop", config="llama3_adam", arguments=(_IMPLEMENTATION, "for-loop")),
    Scenario("several param groups", config="llama3_groups"),
    Scenario(
        "zigzag, a third stays",
        swap_arguments=(f"{_SWAP}-zigzag", f"{_SWAP}-device-budget", "0.3"),
    ),
    Scenario("a third party's container", config="llama3_other"),
    Scenario("Muon and AdamW", config="llama3_muon"),
    Scenario("asynchronous checkpoints", arguments=(_ASYNC, "async")),
    Scenario(
        "asynchronous checkpoints, pinned",
        arguments=(_ASYNC, "async_with_pinned_mem"),
        devices=("sim", "cuda"),
    ),
    Scenario("FSDP2, partial_dtensor", 2, arguments=_PARTIAL),
    Scenario("FSDP2, full_dtensor", 2, arguments=_spmd("full_dtensor"), needs=(2, 14)),
    Scenario("FSDP2, spmd_types", 2, arguments=_spmd("spmd_types"), needs=(2, 14)),
    Scenario("FSDP2, asynchronous checkpoints", 2, arguments=(*_PARTIAL, _ASYNC, "async")),
    Scenario("FSDP2, Muon and AdamW", 2, config="llama3_muon", arguments=_PARTIAL),
    Scenario("tensor parallel", 2, arguments=_degree("tensor"), needs=(2, 14)),
    Scenario(
        "pipeline, 1F1B",
        2,
        arguments=(*_degree("pipeline"), *_PIPELINE, "1F1B"),
        needs=(2, 14),
    ),
    Scenario(
        "pipeline, Interleaved1F1B",
        2,
        arguments=(*_degree("pipeline"), *_PIPELINE, "Interleaved1F1B"),
        needs=(2, 14),
    ),
    Scenario(
        "pipeline, resumed with FSDP2",
        2,
        arguments=(*_degree("pipeline"), *_PIPELINE, "Interleaved1F1B"),
        resume_arguments=("--checkpoint.exclude-from-loading", "dataloader"),
        needs=(2, 14),
    ),
    Scenario(
        "expert parallel, partial_dtensor",
        2,
        config="deepseek_v3",
        arguments=(*_degree("expert"), *_PARTIAL),
    ),
    Scenario(
        "expert parallel, spmd_types",
        2,
        config="deepseek_v3",
        arguments=(*_degree("expert"), *_spmd("spmd_types")),
        needs=(2, 14),
    ),
)
