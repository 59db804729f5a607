# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the real AdamW of each release, and twins that train with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import mindspore as ms
import pytest

from swap_testkit.mindspore.mindformers import adamw_module, installed_folder

# The tensors are small, and the kernels' threads only wait for each other.
ms.set_context(mode=ms.PYNATIVE_MODE, runtime_num_threads=1)


def find_releases() -> dict[str, Path]:
    """The package ``mindformers`` of each release: those named, and last the installed one.

    ``MINDFORMERS_FOLDERS`` names packages, joined as in PATH; ``nox -s tests-swap-mindformers``
    gets them from the index.
    """
    named = os.environ.get("MINDFORMERS_FOLDERS", "").split(os.pathsep)
    folders = [*(Path(name) for name in named if name), installed_folder()]
    for folder in folders:
        if not (folder / "pynative/optimizer/adamw.py").is_file():
            raise FileNotFoundError(f"{folder} is not a package mindformers with a PyNative AdamW")
    return {_version(folder): folder for folder in folders}


def _version(folder: Path) -> str:
    (found,) = [
        distribution.version
        for distribution in importlib.metadata.distributions(
            name="mindformers", path=[str(folder.parent)]
        )
    ]
    return found


RELEASES = find_releases()


@pytest.fixture(scope="session")
def releases() -> dict[str, Path]:
    """All releases' packages, by version."""
    return RELEASES


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> ModuleType:
    """Each release's module of AdamW in turn."""
    return adamw_module(RELEASES[request.param])


@pytest.fixture
def latest() -> ModuleType:
    """The last release's."""
    return adamw_module(list(RELEASES.values())[-1])


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The module ``twins.py`` beside this file."""
    name = "swap_mindformers_tests_twins"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("twins.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
