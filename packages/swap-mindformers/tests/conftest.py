# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the real AdamW of each release, and twins that train with it."""

from __future__ import annotations

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


def folders() -> list[Path]:
    """The releases to test with: unpacked ones, or the one that is installed."""
    named = os.environ.get("MINDFORMERS_FOLDERS")
    found = [Path(name) for name in named.split(os.pathsep)] if named else [installed_folder()]
    for folder in found:
        if not (folder / "pynative/optimizer/adamw.py").is_file():
            raise FileNotFoundError(f"{folder} is not a package mindformers with a PyNative AdamW")
    return found


RELEASES = {release_of: folder for folder in folders() for release_of in [folder.parent.name]}


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
