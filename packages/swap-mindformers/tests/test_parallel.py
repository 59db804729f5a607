# SPDX-License-Identifier: Apache-2.0
"""ZeRO-style sharding with the real AdamW on 2 and 4 processes, by the kit's scenarios.

Each process's optimizer has its rows of every parameter, in bf16 with fp32 masters, or in fp32.
"""

from __future__ import annotations

import pytest

from swap_mindformers import SwapOptimizerConfig
from swap_testkit.mindspore.align import align_scenarios

SECONDS = 480


@pytest.mark.parametrize(
    ("nproc", "optimizers"),
    [(2, ["mindformers-adamw", "mindformers-adamw-fused"]), (4, ["mindformers-adamw"])],
)
def test_zero(nproc, optimizers) -> None:
    alignments = align_scenarios(
        ["zero"],
        optimizers=optimizers,
        config=SwapOptimizerConfig(min_numel=16, swap_times=3),
        steps=2,
        device="cpu",
        nproc=nproc,
        timeout=SECONDS,
    )
    assert len(alignments) == 2 * len(optimizers)  # packed and per tensor, masters in
    assert [a.explain() for a in alignments if not a.aligned] == []
    for alignment in alignments:
        assert alignment.native_memory.idle > 40_000 // nproc
        assert alignment.swapped_memory.idle < alignment.native_memory.idle // 10
        assert alignment.swapped_memory.host >= alignment.native_memory.idle * 0.9


def test_a_language_model_saved_and_loaded_on_the_way() -> None:
    alignments = align_scenarios(
        ["checkpoint"],
        optimizers=["mindformers-adamw"],
        config=SwapOptimizerConfig(min_numel=16, swap_times=3, packed_swap=True),
        steps=2,
        device="cpu",
    )
    assert len(alignments) == 1
    assert [a.explain() for a in alignments if not a.aligned] == []
