# SPDX-License-Identifier: Apache-2.0
"""docs/coverage.md has every row of the RFC, and the tests and scenarios that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from swap_testkit.torch.scenarios import SCENARIOS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "coverage.md"
pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="the page is in the repository, not in the source distribution"
)

TORCH_ROWS = [
    "test_torch_adam_swap_optimizer_parameter_align",
    "test_torch_adamw_swap_optimizer_parameter_align",
    "test_torch_fused_adamw_swap_optimizer_parameter_align",
    "test_torch_adamw_eager_state_swap_optimizer_parameter_align",
    "test_torch_adam_amsgrad_swap_optimizer_parameter_align",
    "test_hyper_adamw_swap_optimizer_parameter_align",
    "test_hyper_adamw_amsgrad_swap_optimizer_parameter_align",
    "test_torch_adam_swap_optimizer_multi_param_group_align",
    "test_fully_shard_adamw_mixed_precision_swap_optimizer_parameter_align",
    "test_fully_shard_optimizer_swap_adamw_4card_parameter_align",
    "test_torch_adam_swap_optimizer_checkpoint_host_state",
]
MINDSPORE_ROWS = [
    "test_native_adam_swap_optimizer_state_align",
    "test_native_adam_nesterov_swap_optimizer_state_align",
    "test_native_adam_amsgrad_swap_optimizer_state_align",
    "test_native_adam_weight_decay_swap_optimizer_state_align",
    "test_mindformers_adamw_non_fused_swap_optimizer_state_align",
    "test_mindformers_adamw_fused_swap_optimizer_state_align",
    "test_native_adam_fully_shard_swap_optimizer_state_align_worker",
    "test_mindformers_adamw_fully_shard_swap_optimizer_state_align_worker",
    "test_native_adam_swap_optimizer_checkpoint_cpu_mirror_roundtrip",
    "test_native_adam_swap_optimizer_checkpoint_fresh_load_builds_slots",
    "test_mindformers_adamw_packed_swap_optimizer_checkpoint_roundtrip",
]
ACCEPTANCE = [f"{number}." for number in range(1, 7)]


def rows() -> dict[str, str]:
    """From the first cell of each table row to the second."""
    cells = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {cell[1].strip(): cell[2].strip() for cell in cells}


def missing_from(covered_by: str) -> list[str]:
    """The tests and scenarios that a cell names and that are not there."""
    missing = []
    folder = ""
    for word in re.findall(r"swap-[a-z]+|`[^`]+`", covered_by):
        if not word.startswith("`"):
            folder = word
            continue
        name = word.strip("`")
        if ".py" not in name:
            missing += [] if name in SCENARIOS else [name]
            continue
        file, _, function = name.partition("::")
        path = ROOT / "packages" / folder / "tests" / file
        if not path.exists() or (function and function not in functions_of(path)):
            missing.append(name)
    return missing


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", TORCH_ROWS)
def test_a_torch_row_of_the_rfc_is_covered(row: str) -> None:
    covered_by = rows()[row]
    assert "`" in covered_by
    assert missing_from(covered_by) == []


@pytest.mark.parametrize("item", ACCEPTANCE)
def test_an_acceptance_item_of_the_rfc_is_covered(item: str) -> None:
    (covered_by,) = [cell for name, cell in rows().items() if name.startswith(item)]
    assert "`" in covered_by
    assert missing_from(covered_by) == []


@pytest.mark.parametrize("row", MINDSPORE_ROWS)
def test_a_mindspore_row_of_the_rfc_is_covered(row: str) -> None:
    covered_by = rows()[row]
    assert "`" in covered_by
    assert missing_from(covered_by) == []


def test_every_test_that_the_page_names_exists() -> None:
    named = [cell for cell in rows().values() if cell.startswith("swap-")]
    assert len(named) > 20
    assert [name for cell in named for name in missing_from(cell)] == []


def test_a_name_that_does_not_exist_would_be_noticed() -> None:
    assert missing_from("swap-torch `test_memory.py::test_nothing`, scenario `fdsp`") == [
        "test_memory.py::test_nothing",
        "fdsp",
    ]
    assert missing_from("swap-core `test_memory.py`") == ["test_memory.py"]
