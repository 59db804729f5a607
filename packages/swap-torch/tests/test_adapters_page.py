# SPDX-License-Identifier: Apache-2.0
"""docs/adapters.md: its examples run, its table is complete, its adapter holds to the laws."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from swap_testkit.torch.laws import LAWS, check_law

PAGE = Path(__file__).parents[3] / "docs" / "adapters.md"
OF_SEVERAL = {"torchao": "adamw8bit"}
"""Adapters of several optimizers, and one of these, as the table has it."""
pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="the page is in the repository, not in the source distribution"
)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the page's Python blocks define, run one after the other."""
    names: dict[str, Any] = {"__name__": "docs_adapters"}
    with warnings.catch_warnings():
        # On this machine, parameters are on the CPU.
        warnings.filterwarnings("ignore", message=".*none of the .* states .* can swap")
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_both_optimizers_of_the_example_swap(example: dict[str, Any]) -> None:
    for name in ("muon", "adamw", "optimizer"):
        assert "swapped: packed" in repr(example[name])


@pytest.mark.parametrize("law", LAWS)
def test_the_example_holds_to(law: str, example: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    check_law(law, example["SUBJECT"])


def test_the_table_has_every_adapter_and_its_states() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line[:2] == "| "]
    told = {
        name.lower(): set(re.findall(r"`(\w+)`", states))
        for names, states in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    for entry in entry_points(group="swap_core.adapters"):
        if entry.name in ("torch.adam", "torch.adamw", "torch.hyper_parallel_adamw"):
            continue
        if entry.name.startswith("torch."):
            name = entry.name.removeprefix("torch.")
            assert set(entry.load().state_names) == told[OF_SEVERAL.get(name, name)]
