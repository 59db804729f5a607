# SPDX-License-Identifier: Apache-2.0
"""Tests on the simulated accelerator, in a process of their own.

It must be enabled before the first ``backward()`` of a process, and stays for the rest of it. So
where other tests are collected too, these are deselected; nox runs this folder by itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import Schedule
from swap_testkit.torch.simulator.build import build

HERE = Path(__file__).parent
DEVICE = "simnpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if HERE not in item.path.parents]
    if others and len(others) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in others])
        items[:] = others


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


@pytest.fixture(scope="session")
def pipelines() -> ModuleType:
    """The module ``pipelines.py`` beside this file: test modules cannot import each other."""
    return _beside("pipelines.py")


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    """The module ``planted.py`` of the folder above."""
    return _beside("../planted.py")


def _beside(name: str) -> ModuleType:
    path = (HERE / name).resolve()
    spec = importlib.util.spec_from_file_location(f"simulator_tests_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and inspect look a module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
