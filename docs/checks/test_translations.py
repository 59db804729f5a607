# SPDX-License-Identifier: Apache-2.0
"""Chinese pages say what English pages say now."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest
from translations import DOCS, english_pages, note_of, noted

_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")

each_page = pytest.mark.parametrize("name", english_pages())


def test_there_are_as_many_pages() -> None:
    chinese = (DOCS / "zh").rglob("*.md")
    assert sorted(page.relative_to(DOCS / "zh").as_posix() for page in chinese) == english_pages()


@each_page
def test_the_english_page_has_not_moved_on(name: str) -> None:
    assert noted(name) == note_of(name), (
        f"docs/{name} has changed: bring docs/zh/{name} up to date, then run "
        f"python docs/checks/translations.py"
    )


@each_page
def test_same_headings_blocks_tables_and_links(name: str) -> None:
    english, chinese = _shape(DOCS, name), _shape(DOCS / "zh", name)
    assert chinese == english


def _shape(folder: Path, name: str) -> dict[str, list[str]]:
    text = _COMMENT.sub("", (folder / name).read_text("utf-8"))
    blocks = [block for block in _FENCED.findall(text) if "{toctree}" not in block]
    prose = _FENCED.sub("", text)
    lines = prose.splitlines()
    return {
        "blocks": blocks,
        "headings": [line.split()[0] for line in lines if re.match("#+ ", line)],
        "rows": [str(line.count("|")) for line in lines if line.startswith("|")],
        "links": sorted(_target(folder, name, link) for link in _LINK.findall(prose)),
    }


def _target(folder: Path, name: str, link: str) -> str:
    """Where a link goes, the same for both languages; links to the other language aside."""
    path = link.partition("#")[0]
    if "://" in link or not path:
        return link.partition("#")[0]
    page = (folder / PurePosixPath(name).parent / path).resolve().relative_to(DOCS.parent)
    there = page.as_posix().replace("docs/zh/", "docs/")
    return "itself" if there == f"docs/{name}" else there
