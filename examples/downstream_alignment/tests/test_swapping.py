# SPDX-License-Identifier: Apache-2.0
"""Does my model train the same with swapped optimizer states?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from my_model import build

from swap_testkit import Alignment
from swap_torch import SwapOptimizerConfig

Check = Callable[..., Alignment]


@pytest.mark.parametrize("packed", [True, False])
def test_swapping_changes_no_bit_and_frees_the_device(assert_aligned: Check, packed: bool) -> None:
    config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
    result = assert_aligned(build, config=config, steps=6)
    assert result.swapped_memory.idle < result.native_memory.idle / 10
    assert result.swapped_memory.peak < result.native_memory.idle


def test_the_same_holds_under_fsdp_on_two_processes(assert_aligned: Check) -> None:
    assert_aligned("my_model:build", steps=4, parallel="fsdp", nproc=2)
