# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys

import swap_mindspore

# Refuses even an import whose failure would be caught, so that it works where nothing is installed.
IMPORT_WITH_REFUSALS = """
import importlib.abc
import sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname in ("torch", "swap_torch", "mindformers"):
            raise AssertionError(f"swap_mindspore imports {fullname}")

sys.meta_path.insert(0, Refuse())
import swap_mindspore
"""


def test_version_is_the_installed_one() -> None:
    assert swap_mindspore.__version__ == importlib.metadata.version("swap-mindspore")


def test_types_are_published() -> None:
    assert importlib.resources.files("swap_mindspore").joinpath("py.typed").is_file()


def test_importing_loads_no_other_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_REFUSALS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
