# SPDX-License-Identifier: Apache-2.0
"""A file in the format of https://keepachangelog.com, as far as a release needs to know it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KINDS", "Changelog"]

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")

_RELEASE = re.compile(r"^## (.*)$", re.M)
_RELEASED = re.compile(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}")
_CHANGED = "### Changed"


@dataclass(frozen=True, slots=True)
class Changelog:
    """What the file says."""

    text: str
    latest: str
    """Version of the newest release."""
    entries: dict[str, str]
    """What is unreleased, by kind; kinds without entries are not there."""

    @classmethod
    def parse(cls, text: str) -> Changelog:
        """Read a file.

        Raises:
            ValueError: it is not in the format; says where.
        """
        titles = _RELEASE.findall(text)
        if titles[:1] != ["[Unreleased]"] or titles.count("[Unreleased]") > 1:
            raise ValueError("the first of its sections must be ## [Unreleased], once.")
        versions = []
        for title in titles[1:]:
            match = _RELEASED.fullmatch(title)
            if match is None:
                raise ValueError(f"'## {title}' must be like '## [0.1.0] - 2026-11-30'.")
            versions.append(match[1])
        if not versions or len(set(versions)) < len(versions):
            raise ValueError("it must have at least one release, and each version once.")
        start, end = _unreleased(text)
        return cls(text, versions[0], _kinds(text[start:end]))

    def released(self, version: str, date: str) -> str:
        """The text, with what was unreleased under ``version``."""
        start, _ = _unreleased(self.text)
        return f"{self.text[:start]}\n\n## [{version}] - {date}{self.text[start:]}"

    def with_change(self, entry: str) -> str:
        """The text, with one more unreleased entry, the last one under Changed."""
        start, end = _unreleased(self.text)
        at = start + _end_of_changed(self.text[start:end])
        before = self.text[:at].rstrip()
        if "Changed" not in self.entries and not before.endswith(_CHANGED):
            before = f"{before}\n\n{_CHANGED}"
        gap = "\n\n" if before.endswith(_CHANGED) else "\n"
        return f"{before}{gap}- {entry}\n\n{self.text[at:]}"


def _unreleased(text: str) -> tuple[int, int]:
    """Where what is unreleased begins, behind its heading, and where it ends."""
    heading, release, *_ = _RELEASE.finditer(text)
    return heading.end(), release.start()


def _end_of_changed(body: str) -> int:
    """Where the section Changed ends; the end of ``body`` if it has none."""
    heading = re.search(rf"^{_CHANGED}$", body, re.M)
    following = re.compile(r"^### ", re.M).search(body, heading.end()) if heading else None
    return following.start() if following else len(body)


def _kinds(body: str) -> dict[str, str]:
    before, *parts = re.split(r"^### ", body, flags=re.M)
    if before.strip():
        raise ValueError(f"what is unreleased must be under one of {', '.join(KINDS)}.")
    found = {}
    for part in parts:
        kind, _, listed = part.partition("\n")
        if kind not in KINDS or kind in found:
            raise ValueError(f"'### {kind}' must be one of {', '.join(KINDS)}, each once.")
        if not listed.strip():
            continue
        if not listed.lstrip().startswith("- "):
            raise ValueError(f"under '### {kind}' there must be a list.")
        found[kind] = listed.strip()
    return found
