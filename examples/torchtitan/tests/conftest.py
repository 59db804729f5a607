# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from _assets import make_assets  # noqa: E402

with warnings.catch_warnings():
    # What it imports warns of much, and warnings are errors in tests.
    warnings.simplefilter("ignore")
    import torchtitan.trainer  # noqa: F401


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A tokenizer and a data set."""
    return make_assets(tmp_path_factory.mktemp("assets"))
