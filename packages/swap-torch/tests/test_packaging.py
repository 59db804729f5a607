# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import subprocess
import sys

import pytest

import swap_torch

# Refuses even an import whose failure would be caught, so that it works where nothing is installed.
IMPORT_WITH_REFUSALS = """
import importlib.abc
import sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname in ("mindspore", "torchtitan"):
            raise AssertionError(f"swap_torch imports {fullname}")

sys.meta_path.insert(0, Refuse())
import swap_torch
"""


def test_version_is_the_installed_one() -> None:
    assert swap_torch.__version__ == importlib.metadata.version("swap-torch")


def test_types_are_published() -> None:
    assert importlib.resources.files("swap_torch").joinpath("py.typed").is_file()


def test_importing_loads_nothing_of_mindspore_and_torchtitan() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_REFUSALS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_binding_to_torchtitan_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)  # as if it were not installed
    words = "needs torchtitan 0.3, .* pip install 'torchtitan>=0.3,<0.4' 'torch>=2.14'"
    with pytest.raises(ImportError, match=words):
        importlib.import_module("swap_torch.integrations.torchtitan")
