# SPDX-License-Identifier: Apache-2.0
"""What pages outside the site point to exists, and sessions that are named can be run.

Links between pages of the site are checked by the strict build; this is for READMEs and the like.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from blocks import ROOT

_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SESSIONS = re.compile(r"nox -s ((?:[a-z]+(?:[_-][a-z]+)*[ `,)]*)+)")


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


PAGES = _tracked("*.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    targets = [target for target, _ in _LINK.findall(page.read_text("utf-8"))]
    local = [target for target in targets if "://" not in target and "mailto:" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    # These are made by the build, and known to it.
    assert [
        each for each in missing if not each.startswith(("api/", "../api/", "changelog/"))
    ] == []
