# SPDX-License-Identifier: Apache-2.0
"""Every public name is in the built site, with words about it. Needs the site in build/docs."""

from __future__ import annotations

import dataclasses

import pytest
from bs4 import BeautifulSoup, Tag
from reference import ROOT, PublicModule, public_modules

from swap_core import SwapOptimizerConfig

SITE = ROOT / "build" / "docs"


@pytest.mark.parametrize("module", public_modules().values(), ids=lambda module: module.name)
def test_every_public_name_is_described(module: PublicModule) -> None:
    page = SITE / "api" / f"{module.name}.html"
    assert page.exists(), "build the site first: nox -s docs"
    soup = BeautifulSoup(page.read_text("utf-8"), "html.parser")
    silent = [name for name in module.names if not _words(soup, f"{module.name}.{name}")]
    assert silent == [], f"{module.name}: these have no docstring, or are not in the site"


@pytest.mark.parametrize("field", dataclasses.fields(SwapOptimizerConfig), ids=lambda f: f.name)
def test_users_are_told_when_to_change_a_setting(field: dataclasses.Field[object]) -> None:
    rows = (ROOT / "docs" / "choosing.md").read_text("utf-8").splitlines()
    assert any(row.startswith(f"| `{field.name}` |") for row in rows)


def _words(soup: BeautifulSoup, name: str) -> str:
    """The first words about ``name``; none if it is not there."""
    anchor = soup.find(id=name)
    if not isinstance(anchor, Tag):
        return ""
    description = anchor.find_next_sibling("dd")
    paragraphs = description.find_all("p", recursive=False) if description else []
    texts = [paragraph.get_text().strip() for paragraph in paragraphs]
    return next((text for text in texts if not text.startswith("Bases:")), "")
