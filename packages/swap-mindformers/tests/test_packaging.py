# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys

import swap_mindformers

# Refuses even an import whose failure would be caught, so that it works where nothing is installed.
IMPORT_WITH_REFUSALS = """
import importlib.abc
import sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname in ("torch", "swap_torch", "mindformers"):
            raise AssertionError(f"swap_mindformers imports {fullname}")

sys.meta_path.insert(0, Refuse())
import swap_mindformers
"""


def test_version_is_the_installed_one() -> None:
    assert swap_mindformers.__version__ == importlib.metadata.version("swap-mindformers")


def test_types_are_published() -> None:
    assert importlib.resources.files("swap_mindformers").joinpath("py.typed").is_file()


def test_importing_loads_no_other_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_REFUSALS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_installing_pulls_in_the_binding_and_not_mindformers() -> None:
    required = importlib.metadata.requires("swap-mindformers") or []
    names = {line.split(">")[0].split("<")[0].split("=")[0].strip() for line in required}
    assert names == {"swap-core", "swap-mindspore"}


def test_the_adapter_is_an_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="swap_core.adapters")
    (entry,) = [each for each in entries if each.name == "mindspore.mindformers_adamw"]
    assert entry.load() is swap_mindformers.MindFormersAdamWAdapter


def test_every_release_that_is_said_to_work_is_tested(releases) -> None:
    assert tuple(releases) == swap_mindformers.KNOWN_VERSIONS
