# SPDX-License-Identifier: Apache-2.0
"""Links between files exist, sessions that pages name exist, blocks say what they are.

The strict build checks links between pages of the site; this also knows READMEs and the like.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from reference import ROOT

_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SESSION = re.compile(r"nox -s ([a-z][\w-]*)((?: [a-z][\w-]*)*)")
_BLOCK = re.compile(r"^```.*?^```$", re.M | re.S)
_FENCE = re.compile(r"^```(.*)$", re.M)

LANGUAGES = ("python", "console", "text", "toml", "yaml")
MADE = ("api/", "../api/", "changelog/", "../changelog/")
"""The build makes these, and checks links to them."""


def _pages() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


PAGES = _pages()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_linked_files_exist(page: Path) -> None:
    prose = _BLOCK.sub("", page.read_text("utf-8"))
    targets = [target for target, _ in _LINK.findall(prose)]
    local = [each for each in targets if "://" not in each and not each.startswith(MADE)]
    assert [each for each in local if not (page.parent / each).exists()] == []


@each_page
def test_blocks_have_a_language(page: Path) -> None:
    opening = _FENCE.findall(page.read_text("utf-8"))[::2]
    known = [language for language in opening if language in LANGUAGES or "{" in language]
    assert opening == known, "a block that is code must be python or console, to be run"


@each_page
def test_named_sessions_exist(page: Path) -> None:
    calls = _SESSION.findall(page.read_text("utf-8"))
    named = {name for first, more in calls for name in (first, *more.split())}
    assert named - _sessions() == set()


def _sessions() -> set[str]:
    """The names that noxfile.py registers, found without running it."""
    tree = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marked = [node.name for node in functions if "nox.session" in map(_name, node.decorator_list)]
    distributions = [file.parent.name for file in ROOT.glob("packages/*/pyproject.toml")]
    return {*marked, *(f"{kind}-{name}" for kind in ("tests", "minimum") for name in distributions)}


def _name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)
