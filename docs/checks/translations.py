# SPDX-License-Identifier: Apache-2.0
"""Which pages have a Chinese translation, and of which English text it is one.

``python docs/checks/translations.py`` notes in each page of docs/zh that it translates the English
page as it is now. Run it after translating.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

__all__ = ["DOCS", "ENGLISH_ONLY", "english_pages", "note_of", "noted"]

DOCS = Path(__file__).resolve().parents[1]

ENGLISH_ONLY = {
    # For contributors.
    "design.md",
    "coverage.md",
}

_NOTE = re.compile(r"^<!-- Translates (\S+), sha256 ([0-9a-f]{16}) -->$", re.M)


def english_pages() -> list[str]:
    """The pages that must be translated, relative to docs."""
    found = [*DOCS.glob("*.md"), *DOCS.glob("migrating/*.md")]
    names = (page.relative_to(DOCS).as_posix() for page in found)
    return sorted(name for name in names if name not in ENGLISH_ONLY)


def note_of(name: str) -> str:
    """The line that says that the English page ``name``, as it is now, was translated."""
    digest = hashlib.sha256((DOCS / name).read_bytes()).hexdigest()[:16]
    return f"<!-- Translates {name}, sha256 {digest} -->"


def noted(name: str) -> str:
    """The line of this kind in the translation of ``name``; empty if there is none."""
    match = _NOTE.search((DOCS / "zh" / name).read_text("utf-8"))
    return match[0] if match else ""


def _note_all() -> None:
    for name in english_pages():
        page = DOCS / "zh" / name
        text = page.read_text("utf-8")
        rest = _NOTE.sub("", text).lstrip("\n")
        page.write_text(f"{note_of(name)}\n\n{rest}", "utf-8")


if __name__ == "__main__":
    _note_all()
