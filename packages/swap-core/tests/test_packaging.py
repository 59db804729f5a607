# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys

import swap_core

# Refuses even an import whose failure would be caught, so that it works where nothing is installed.
IMPORT_WITH_REFUSALS = """
import importlib.abc
import sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname in {"torch", "torch_npu", "mindspore", "numpy"}:
            raise AssertionError(f"swap_core imports {fullname}")

sys.meta_path.insert(0, Refuse())
import swap_core
"""


def test_version_is_the_installed_one() -> None:
    assert swap_core.__version__ == importlib.metadata.version("swap-core")


def test_types_are_published() -> None:
    assert importlib.resources.files("swap_core").joinpath("py.typed").is_file()


def test_importing_loads_no_framework_and_no_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_REFUSALS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
