# SPDX-License-Identifier: Apache-2.0
"""What the code of pages finds in its namespace, for torchtitan: nothing; see ``blocks``."""

from __future__ import annotations

import warnings
from typing import Any

from blocks import sybil

with warnings.catch_warnings():
    # What it imports warns of much, and warnings are errors in the code of pages.
    warnings.simplefilter("ignore")
    import torchtitan.trainer  # noqa: F401

__all__ = ["pytest_collect_file"]


def _setup(namespace: dict[str, Any]) -> None:
    """Pages import what they use."""


def _teardown() -> None:
    """Nothing outlives a page."""


pytest_collect_file = sybil(_setup, _teardown).pytest()
