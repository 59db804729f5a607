# SPDX-License-Identifier: Apache-2.0
"""Parallel trainings that are ready to be run twice."""

from swap_testkit.torch.parallel import Place
from swap_testkit.torch.scenarios import (
    context_parallel,
    data_parallel,
    expert_parallel,
    muon,
    pipeline_parallel,
    tensor_parallel,
)
from swap_testkit.torch.scenarios.base import LmTrainer, Scenario
from swap_testkit.torch.scenarios.optimizers import OPTIMIZERS

__all__ = ["OPTIMIZERS", "SCENARIOS", "LmTrainer", "Place", "Scenario"]

_MODULES = (
    data_parallel,
    tensor_parallel,
    pipeline_parallel,
    expert_parallel,
    context_parallel,
    muon,
)

SCENARIOS = {scenario.name: scenario for module in _MODULES for scenario in module.SCENARIOS}
"""All scenarios, by name."""
