# SPDX-License-Identifier: Apache-2.0
"""A file in the format of https://keepachangelog.com, as far as a release needs to know it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KINDS", "Changelog"]

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")

_RELEASE = re.compile(r"^## (.*)$", re.M)
_RELEASED = re.compile(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}")
_UNRELEASED = "## [Unreleased]"


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
            raise ValueError(f"the first of its sections must be {_UNRELEASED}, once.")
        versions = []
        for title in titles[1:]:
            match = _RELEASED.fullmatch(title)
            if match is None:
                raise ValueError(f"'## {title}' must be like '## [0.1.0] - 2026-11-30'.")
            versions.append(match[1])
        if not versions or len(set(versions)) < len(versions):
            raise ValueError("it must have at least one release, and each version once.")
        return cls(text, versions[0], _kinds(text.split(_UNRELEASED)[1].partition("\n## ")[0]))

    def released(self, version: str, date: str) -> str:
        """The text, with what was unreleased under ``version``."""
        return self.text.replace(_UNRELEASED, f"{_UNRELEASED}\n\n## [{version}] - {date}", 1)

    def with_change(self, entry: str) -> str:
        """The text, with one more unreleased entry, under Changed."""
        head, after = self.text.split(_UNRELEASED)
        body, separator, rest = after.partition("\n## ")
        if "Changed" in self.entries:
            heading, listed = "### Changed\n\n", self.entries["Changed"]
            body = body.replace(heading + listed, f"{heading}{listed}\n- {entry}", 1)
        else:
            body = f"{body.rstrip()}\n\n### Changed\n\n- {entry}\n"
        return head + _UNRELEASED + body + separator + rest


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
