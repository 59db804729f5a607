# SPDX-License-Identifier: Apache-2.0
"""What the troubleshooting page quotes is what the code says.

Each text block there is one message, or the beginning of one; ``<...>`` stands for what the code
fills in.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from reference import ROOT

_BLOCK = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
_FILLED = "\0"

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = _BLOCK.findall(PAGE.read_text("utf-8"))


@cache
def _messages() -> tuple[str, ...]:
    """Every string of the packages that is long enough to be a message."""
    nodes = (
        node
        for file in sorted(ROOT.glob("packages/*/src/**/*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
    )
    found = (_template(node) for node in nodes)
    return tuple(_one_line(text) for text in found if len(text) > 30)


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(_template(p) if isinstance(p, ast.Constant) else _FILLED for p in parts)
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: quoted[:40])
def test_a_quoted_message_is_in_the_code(quoted: str) -> None:
    wanted = re.sub(r"<[^>]+>", _FILLED, _one_line(quoted).removesuffix(" …"))
    assert any(wanted in message for message in _messages()), "no such message in packages/"


def test_there_are_messages() -> None:
    assert len(QUOTED) > 10
