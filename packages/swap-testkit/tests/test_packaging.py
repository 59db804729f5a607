# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import importlib.resources

import swap_testkit


def test_version_is_the_installed_one() -> None:
    assert swap_testkit.__version__ == importlib.metadata.version("swap-testkit")


def test_types_are_published() -> None:
    assert importlib.resources.files("swap_testkit").joinpath("py.typed").is_file()
