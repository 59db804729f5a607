# SPDX-License-Identifier: Apache-2.0
"""Parallel training: on processes under msrun, and rank by rank where the CPU build cannot.

Its CPU build has no send and receive and no all-to-all, so pipeline, expert and context parallel
are taken apart: each rank's optimizer gets the parameters and gradients that the rank would have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from swap_mindspore import SwapOptimizerConfig
from swap_testkit.mindspore.align import align_scenarios
from swap_testkit.mindspore.launch import JOINED, RankFailedError, Work, launch, run_under_msrun

RANKS = Path(__file__).with_name("ranks.py")
SECONDS = 480
STATE_BYTES = 2 * 2 * 8 * 16 * 4
"""Of both moments of both weights."""


def run_ranks(count: int, kind: str, folder: Path) -> list[dict[str, dict[str, object]]]:
    """Run ranks.py under msrun."""
    run_under_msrun(RANKS, str(folder), kind, folder=folder, nproc=count, timeout=SECONDS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def test_the_scenarios_of_the_kit_on_two_processes() -> None:
    """Data parallel, ZeRO-style and tensor parallel, a small language model on real text."""
    alignments = align_scenarios(
        ["data-parallel", "zero", "tensor-parallel"],
        optimizers=["adam", "adam-weight-decay"],
        config=SwapOptimizerConfig(min_numel=16, swap_times=3),
        steps=2,
        device="cpu",
        nproc=2,
        timeout=SECONDS,
    )
    assert len(alignments) == 6
    assert [a.explain() for a in alignments if not a.aligned] == []
    whole, rows = (a.swapped_memory.host for a in (alignments[0], alignments[2]))
    assert rows == whole // 2
    assert all(a.swapped_memory.idle < a.native_memory.idle // 10 for a in alignments)


def test_a_rank_that_fails_is_told_with_its_log() -> None:
    work = Work(("single",), ("none",), SwapOptimizerConfig(), 1)
    with pytest.raises(RankFailedError, match="KeyError: 'none'"):
        launch(work, nproc=2, timeout=SECONDS)


@pytest.mark.parametrize(("count", "kind"), [(4, "adam-weight-decay")])
def test_processes(tmp_path, count, kind) -> None:
    """Data parallel, ZeRO-style and tensor parallel training, in one launch."""
    by_rank = run_ranks(count, kind, tmp_path)
    # By which the launcher knows that what fails is the ranks' own doing.
    assert len(list(tmp_path.glob(f"{JOINED}*"))) == count
    for found in by_rank:
        assert set(found) == {"data_parallel", "zero", "tensor_parallel"}
        for name, result in found.items():
            host = STATE_BYTES if name.startswith("data") else STATE_BYTES // count
            assert result == {
                "wrapped": True,
                "losses": True,
                "bits": True,
                "whole": True,
                "serial": True,
                "idle": 0,
                "host": host,
            }


class Stack(nn.Cell):
    """Four layers: stages of a pipeline, or experts that are all asked."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.experts = experts
        self.shared = nn.Dense(6, 6)
        self.parts = nn.CellList([nn.Dense(6, 6) for _ in range(4)])
        values = np.random.default_rng(0)
        for param in self.get_parameters():
            param.set_data(Tensor(values.standard_normal(param.shape).astype(np.float32) * 0.4))

    def construct(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        if not self.experts:
            for part in self.parts:
                x = ops.tanh(part(x))
            return x
        rows = ops.split(x, x.shape[0] // 4)  # each expert has its tokens
        pairs = zip(self.parts, rows, strict=True)
        return ops.concat([ops.tanh(part(row)) for part, row in pairs])


def names_on(kind: str, rank: int) -> Sequence[str]:
    """Which layers a rank of two has."""
    if kind == "context":
        return ["shared", "parts"]
    own = [f"parts.{2 * rank}.", f"parts.{2 * rank + 1}."]
    return [*own, *(["shared"] if kind == "expert" or rank == 0 else [])]


def train(kind: str, wrap) -> list[nn.Optimizer]:
    net = Stack(experts=kind == "expert")
    everything = net.trainable_params()
    local: list[list[Parameter]] = [
        [p for p in everything if any(name in p.name for name in names_on(kind, rank))]
        for rank in range(2)
    ]
    if kind != "pipeline":  # a replica of its own for what both ranks have
        local[1] = [Parameter(p.asnumpy().copy(), name=p.name) for p in local[1]]
    optimizers = [wrap(nn.Adam(params, 0.01)) for params in local]
    gradient = ms.grad(lambda x: (net(x) ** 2).mean(), None, everything)
    for step in range(2):
        parts = [
            Tensor(np.random.default_rng((step, i)).standard_normal((8, 6)).astype(np.float32))
            for i in range(2)  # micro-batches, or parts of the sequence
        ]
        grads = [sum(both) for both in zip(*map(gradient, parts), strict=True)]
        by_name = dict(zip([p.name for p in everything], grads, strict=True))
        for optimizer in optimizers:
            optimizer(tuple(by_name[param.name] for param in optimizer.parameters))
    return optimizers


@pytest.mark.parametrize("kind", ["pipeline", "expert", "context"])
def test_rank_by_rank(kit, kind) -> None:
    from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer

    device = HostDevice(poison=True)  # both ranks' optimizers through one device
    config = SwapOptimizerConfig(min_numel=0, swap_times=2)
    native = train(kind, lambda optimizer: optimizer)
    swapped = train(kind, lambda optimizer: swap_optimizer(optimizer, config, device=device))
    for one, other in zip(native, swapped, strict=True):
        assert kit.bits_of(other) == kit.bits_of(one)
        assert kit.device_bytes(other) == 0
    counts = [len(optimizer.parameters) for optimizer in swapped]
    assert counts == {"pipeline": [6, 4], "expert": [6, 6], "context": [10, 10]}[kind]
