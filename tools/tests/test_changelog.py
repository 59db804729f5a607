# SPDX-License-Identifier: Apache-2.0
"""Changelogs, however their blank lines are set."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from changelog import Changelog

PROSE = (
    "# Changelog\n\n## [Unreleased]\n",
    "# Changelog\n\nWhat goes under `## [Unreleased]`, and ### Changed, is not out.\n\n"
    "## [Unreleased]\n",
)
RELEASED = "## [0.1.0] - 2026-11-30\n\n### Changed\n\n- First.\n"
SECTIONS = (
    (),
    ("Changed",),
    ("Added", "Changed"),
    ("Changed", "Fixed"),
    ("Added", "Changed", "Fixed"),
    ("Added", "Fixed"),
)
LISTS = ("- It.\n", "- It,\n  on two lines.\n- More.\n", "- It.\n\n- More.\n\n  Of it.\n", "")


def layouts():
    """Yield texts of every layout that can be read."""
    gaps = ("", "\n", "\n\n")
    for prose, kinds, listed, before, after in itertools.product(
        PROSE, SECTIONS, LISTS, gaps, gaps
    ):
        sections = "".join(f"### {kind}\n{before}{listed}{after}" for kind in kinds)
        yield f"{prose}{after}{sections}{RELEASED}"


def inserted(old: str, new: str) -> list[str]:
    """Return the lines of ``new`` that are added; all of ``old`` must be there, in its order.

    How many blank lines there are does not matter.
    """
    expected = [line for line in old.splitlines() if line]
    added = []
    for line in filter(None, new.splitlines()):
        if expected and line == expected[0]:
            expected.pop(0)
        else:
            added.append(line)
    assert not expected
    return added


def test_an_entry_is_added_to_every_layout() -> None:
    for text in layouts():
        log = Changelog.parse(text)
        new = log.with_change("Needs it.")
        heading = "\n### Changed\n" in text.rpartition(RELEASED)[0]
        added = ["- Needs it."] if heading else ["### Changed", "- Needs it."]
        assert inserted(text, new) == added, text
        entries = Changelog.parse(new).entries
        assert entries.pop("Changed").splitlines()[-1] == "- Needs it.", text
        assert entries == {k: v for k, v in log.entries.items() if k != "Changed"}, text
        assert new.endswith(f"\n{RELEASED}"), text


def test_every_layout_is_released() -> None:
    for text in layouts():
        new = Changelog.parse(text).released("0.2.0", "2027-01-31")
        assert inserted(text, new) == ["## [0.2.0] - 2027-01-31"], text
        log = Changelog.parse(new)
        assert (log.latest, log.entries) == ("0.2.0", {}), text


def test_a_gap_between_entries_stays() -> None:
    text = f"# Changelog\n\n## [Unreleased]\n\n### Changed\n- It.\n\n### Fixed\n- It.\n\n{RELEASED}"
    new = Changelog.parse(text).with_change("Needs it.")
    assert new == text.replace("- It.\n", "- It.\n- Needs it.\n", 1)


@pytest.mark.parametrize("listed", ["It.", "* It."])
def test_what_is_no_list(listed: str) -> None:
    text = f"# Changelog\n\n## [Unreleased]\n\n### Added\n\n{listed}\n\n{RELEASED}"
    with pytest.raises(ValueError, match="under '### Added' there must be a list"):
        Changelog.parse(text)
