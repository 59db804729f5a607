# SPDX-License-Identifier: Apache-2.0
"""Planted faults of training: the kit must report each of them, by name (SPEC K4).

| fault | reported as |
| --- | --- |
| one copy out is skipped | the states of that batch, from that step on |
| one parameter is one ulp off | that parameter, 1 ulp |
| a counter advances twice | that counter |
| the other implementation (fused for for-loop) | parameters and states, not counters |
| a Partial gradient is used unreduced | parameters of the ranks |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from swap_core import SwapOptimizerConfig
from swap_testkit import Alignment, Tamper, Tolerance
from swap_testkit.outcome import merge
from swap_testkit.torch import CpuAsDevice, TorchRecordingDevice, launch
from swap_testkit.torch.align import align_trainers
from swap_testkit.torch.parallel import Place
from swap_testkit.torch.record import Wrap, wrapper
from swap_testkit.torch.scenarios import OPTIMIZERS, SCENARIOS
from swap_torch import swap_optimizer

CONFIG = SwapOptimizerConfig(swap_times=3, min_numel=16)
CPU = torch.device("cpu")
STEPS = 4


def compare(wrap: Wrap, optimizer: str = "adamw") -> Alignment:
    """A single process, native against the faulty wrap."""
    make = partial(SCENARIOS["single"].build, Place(0, 1, CPU), OPTIMIZERS[optimizer])
    outcomes = align_trainers(make, [wrap], steps=STEPS)
    return merge("single", "faulty", outcomes, STEPS, Tolerance())


def after_step(number: int, fault: Callable[[torch.optim.Optimizer], None]) -> Wrap:
    """Swap rightly, and do ``fault`` right after step ``number``."""

    def wrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        swapped = wrapper(CONFIG, CPU)(optimizer)
        steps = []

        def hook(*_: object) -> None:
            steps.append(None)
            if len(steps) == number + 1:
                fault(swapped)

        swapped.register_step_post_hook(hook)
        return swapped

    return wrap


def names(alignment: Alignment) -> set[str]:
    return {mismatch.name for mismatch in alignment.mismatches}


def test_the_right_wrap_is_aligned() -> None:
    assert compare(wrapper(CONFIG, CPU)).aligned


def test_a_skipped_copy_out_is_reported_with_the_states_of_its_batch() -> None:
    def wrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        device = TorchRecordingDevice(CpuAsDevice())
        # Three batches a step: the second store of the last step, which nothing reads again.
        device.tamper = Tamper("copy_out", 3 * (STEPS - 1) + 1)
        return swap_optimizer(optimizer, CONFIG, device=device)

    found = compare(wrap)
    assert found.mismatches
    assert all(name.startswith("exp_avg") for name in names(found))
    assert all(mismatch.step == STEPS - 1 for mismatch in found.mismatches)


def test_one_ulp_in_one_parameter_is_reported_as_such() -> None:
    def nudge(optimizer: torch.optim.Optimizer) -> None:
        weight = optimizer.param_groups[0]["params"][-1]
        weight.data.view(-1)[3:4].view(torch.int32).add_(1)

    found = compare(after_step(STEPS - 1, nudge))
    (mismatch,) = found.mismatches
    assert mismatch.name == "head.weight"
    assert mismatch.step == STEPS - 1
    assert mismatch.difference is not None
    assert (mismatch.difference.ulps, mismatch.difference.index) == (1, (0, 3))
    assert "head.weight" in found.explain()


def test_a_counter_that_advances_twice_is_reported_with_its_step() -> None:
    def advance(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] += 1

    found = compare(after_step(1, advance))
    first = found.mismatches[0]
    assert (first.name, first.step) == ("step of embedding.weight", 1)
    assert first.difference is not None
    assert (first.difference.native, first.difference.swapped) == (STEPS, STEPS + 1)


def test_the_other_implementation_is_reported() -> None:
    def wrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups:
            group["fused"] = True
        return wrapper(CONFIG, CPU)(optimizer)

    found = compare(wrap)
    assert "head.weight" in names(found)
    assert "exp_avg_sq of head.weight" in names(found)


class Unreduced(torch.optim.AdamW):
    """Steps with this rank's part of each gradient in place of the sum, as if it were reduced."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank = dist.get_rank()
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param.grad, DTensor):
                    param.grad._local_tensor.mul_(rank + 1)
        super().step()


def unreduced_on_rank() -> list[object]:
    place = Place(dist.get_rank(), dist.get_world_size(), CPU)
    make = partial(SCENARIOS["fsdp"].build, place, OPTIMIZERS["adamw"])

    def wrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.__class__ = Unreduced
        return optimizer

    return list(align_trainers(make, [wrap], steps=1, rank=place.rank))


def test_gradients_that_are_not_reduced_are_reported() -> None:
    by_rank = launch(unreduced_on_rank, nproc=2)
    found = merge("fsdp", "unreduced", [outcomes[0] for outcomes in by_rank], 1, Tolerance())
    assert not found.aligned
    assert "exp_avg of head.weight" in names(found)
    assert {mismatch.rank for mismatch in found.mismatches if "exp_avg" in mismatch.name} == {1}
