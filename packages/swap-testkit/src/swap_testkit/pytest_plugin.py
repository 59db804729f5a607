# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: ``assert_aligned`` as a fixture, and a line for each alignment at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pytest

from swap_core import format_bytes
from swap_testkit.alignment import Alignment
from swap_testkit.api import assert_aligned as check

__all__ = ["assert_aligned", "pytest_terminal_summary"]

_seen = pytest.StashKey[list[Alignment]]()


@pytest.fixture
def assert_aligned(request: pytest.FixtureRequest) -> Callable[..., Alignment]:
    """:func:`swap_testkit.assert_aligned`, whose result is also told at the end of the run."""

    @wraps(check)
    def checked(*args: object, **kwargs: object) -> Alignment:
        alignment = check(*args, **kwargs)  # type: ignore[arg-type]  # wraps: its own signature
        request.config.stash.setdefault(_seen, []).append(alignment)
        return alignment

    return checked


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Tell what was aligned, and the memory that swapping saved."""
    alignments = config.stash.get(_seen, [])
    if alignments:
        terminalreporter.section("swap alignment")
    for a in alignments:
        terminalreporter.write_line(
            f"{a.title}: {a.steps} losses and {a.compared} tensors equal ({a.tolerance}); states "
            f"on the device: {format_bytes(a.native_memory.idle)} natively, "
            f"{format_bytes(a.swapped_memory.idle)} idle and "
            f"{format_bytes(a.swapped_memory.peak)} at most swapped"
        )
