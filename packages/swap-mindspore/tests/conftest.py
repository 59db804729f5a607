# SPDX-License-Identifier: Apache-2.0
"""What the tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mindspore as ms
import pytest

# The tensors are small, and the kernels' threads only wait for each other.
ms.set_context(runtime_num_threads=1)


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The module ``twins.py`` beside this file."""
    name = "swap_mindspore_tests_twins"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("twins.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _pynative() -> Iterator[None]:
    """Every test starts in PyNative mode, whatever the one before left."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)
