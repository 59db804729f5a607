# SPDX-License-Identifier: Apache-2.0
"""`align` on a user's job: what is compared, what is reported, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from swap_core import SwapOptimizerConfig
from swap_testkit import Tolerance, align, assert_aligned
from swap_testkit.report import write_report
from swap_testkit.torch import Job
from swap_testkit.torch.model import Transformer, lm_loss, text_batch, unit_initialised

STEPS = 3
CONFIG = SwapOptimizerConfig(swap_times=4, min_numel=16)


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)  # type: ignore[arg-type]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return lm_loss(model(batch[0]), batch[1])


def transformer(seed: int) -> Job:
    return Job(unit_initialised(Transformer(), seed), adamw, text_batch, loss, clip_norm=1.0)


class Drifting(torch.optim.AdamW):
    """Not deterministic: each instance has its own learning rate."""

    made = 0


def drifting(seed: int) -> Job:
    def optimizer(params: object) -> torch.optim.Optimizer:
        Drifting.made += 1
        return torch.optim.AdamW(params, lr=1e-2 + 1e-3 * Drifting.made)  # type: ignore[arg-type]

    return Job(unit_initialised(Transformer(), seed), optimizer, text_batch, loss)


def not_a_job(seed: int) -> object:
    return seed


@pytest.mark.parametrize("packed", [True, False])
def test_it_finds_a_swapped_training_aligned_and_smaller(packed: bool) -> None:
    config = SwapOptimizerConfig(swap_times=4, min_numel=16, packed_swap=packed)
    result = assert_aligned(transformer, steps=STEPS, config=config)
    params = list(unit_initialised(Transformer(), 0).parameters())
    state_bytes = sum(2 * p.numel() * p.element_size() for p in params)
    assert result.compared == 4 * len(params)  # the parameter, two moments, a counter
    assert len(result.losses) == STEPS
    assert result.native_memory.idle == result.native_memory.peak == state_bytes
    assert result.swapped_memory.idle == 0
    assert 0 < result.swapped_memory.peak < state_bytes
    assert result.swapped_memory.host >= state_bytes


@pytest.mark.parametrize(("parallel", "nproc"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_it_makes_a_job_parallel(parallel: str, nproc: int) -> None:
    result = assert_aligned(transformer, steps=STEPS, config=CONFIG, parallel=parallel, nproc=nproc)
    one_rank = 4 * len(list(Transformer().parameters()))
    assert result.compared == nproc * one_rank
    assert f"{parallel} on {nproc}" in result.title


def test_it_reports_the_first_step_the_name_and_the_distance() -> None:
    result = align(drifting, steps=STEPS, config=CONFIG)
    assert not result.aligned
    first = result.mismatches[0]
    assert first.step == 0
    assert first.difference is not None
    assert first.difference.ulps > 0
    names = {mismatch.name for mismatch in result.mismatches}
    assert {"loss", "embedding.weight", "exp_avg of head.weight"} <= names
    assert "step of embedding.weight" not in names
    text = result.explain()
    assert "NOT aligned (exact)" in text
    assert "ulps apart" in text
    with pytest.raises(AssertionError, match="NOT aligned"):
        assert_aligned(drifting, steps=STEPS, config=CONFIG)


def exploding(seed: int) -> Job:
    def optimizer(params: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=float("inf"))  # type: ignore[arg-type]

    return Job(unit_initialised(Transformer(), seed), optimizer, text_batch, loss)


def test_a_training_that_is_lost_natively_too_shows_nothing() -> None:
    result = align(exploding, steps=STEPS, config=CONFIG)
    assert not result.aligned
    assert {mismatch.name for mismatch in result.mismatches} == {"loss", "embedding.weight"}
    assert "also natively: vacuous" in result.explain()


def test_a_tolerance_is_used_when_asked_for_and_named() -> None:
    result = align(drifting, steps=STEPS, config=CONFIG, tolerance=Tolerance(rtol=10, atol=10))
    assert result.aligned
    assert "rtol=10, atol=10" in result.explain()


def test_a_report_has_everything_as_json_and_a_picture(tmp_path: Path) -> None:
    result = align(transformer, steps=STEPS, config=CONFIG)
    text, picture = write_report([result], tmp_path / "new" / "folder")
    (stored,) = json.loads(text.read_text())["alignments"]
    assert stored["aligned"] is True
    assert stored["losses"] == [list(pair) for pair in result.losses]
    assert stored["native_memory"]["idle"] == result.native_memory.idle
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, ("steps=0", "integer >= 1")),
        ({"nproc": True}, ("nproc=True", "integer >= 1")),
        ({"parallel": "tp"}, ("parallel='tp'", "fsdp")),
        ({"builder": "no_colon"}, ("'no_colon'", "package.module:function")),
        ({"builder": "json:nothing"}, ("json", "no function nothing")),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: dict[str, object], words: tuple[str, ...]
) -> None:
    builder = arguments.pop("builder", transformer)
    with pytest.raises(ValueError, match=r".") as refusal:
        align(builder, **arguments)  # type: ignore[arg-type]
    assert all(word in str(refusal.value) for word in words)


def test_a_builder_that_returns_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must return a swap_testkit\.torch\.Job"):
        align(not_a_job, steps=1)  # type: ignore[arg-type]
