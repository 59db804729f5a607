# SPDX-License-Identifier: Apache-2.0
"""Tests on the simulated accelerator.

It stays for the rest of the process, and torch then has an accelerator; so these tests run last.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Schedule
from swap_testkit.torch.simulator.build import build

HERE = Path(__file__).parent
DEVICE = "simnpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: HERE in item.path.parents)


@pytest.fixture(scope="session")
def _enabled() -> None:
    torch.set_num_threads(1)
    try:
        build()
    except simulator.BuildError as error:
        if "needs a C++20 compiler" not in str(error):
            raise
        pytest.skip(f"the simulated accelerator is not tested: {error}")
    simulator.enable(DEVICE, devices=2)


@pytest.fixture(autouse=True)
def fresh_simulator(_enabled: None) -> Iterator[None]:
    """The defaults, an empty memory, and afterwards no race that the test did not look at."""
    simulator.enable(DEVICE, devices=2)
    simulator.reset()
    yield
    found = simulator.races()
    simulator.set_schedule(Schedule.EARLIEST)
    assert found == []


@pytest.fixture(params=list(Schedule), ids=lambda schedule: schedule.name.lower())
def schedule(request: pytest.FixtureRequest) -> Schedule:
    """Each schedule, in force."""
    chosen: Schedule = request.param
    simulator.set_schedule(chosen, seed=3)
    return chosen
