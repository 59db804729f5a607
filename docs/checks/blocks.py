# SPDX-License-Identifier: Apache-2.0
"""Run the code of a page: its python blocks in order and in one namespace, its console blocks.

A pytest plugin for ``nox -s docs``: ``pytest -p blocks PAGE.md ...``. A page's blocks see the names
of ``blocks_torch`` or ``blocks_mindspore``, one of which is loaded beside this.

- A python block that begins with a comment such as ``# my_package/my_module.py`` is not run but
  written to that file, in a folder that the page's console blocks run in.
- A console block is run by bash; ``python`` is the one that runs pytest. A text block right after
  it is what it prints.
- A block that is not run has ``<!--- skip: next "why not" -->`` before it; without words it fails.
- Blocks of other languages (text, yaml, ...) are not code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reference import ROOT
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer

__all__ = ["sybil"]

SECONDS = 120
"""For one console block."""

_INSTALLS = re.compile(r"\bpip3? install\b|\bnox\b")
_OUTPUT = re.compile(r"\s*^```text\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")

_folders: dict[str, tempfile.TemporaryDirectory[str]] = {}


def sybil(setup: Callable[[dict[str, Any]], None], teardown: Callable[[], None]) -> Sybil:
    """What collects pages: give its ``pytest()`` to pytest as ``pytest_collect_file``.

    Args:
        setup: Fills the namespace of a page.
        teardown: Checks what a page left.
    """
    return Sybil(
        parsers=[
            CodeBlockParser("python", _run_python),
            CodeBlockParser("console", _run_console),
            _hidden_blocks,
            SkipParser(),
            _skips_have_reasons,
        ],
        path=str(ROOT),
        patterns=["*.md"],
        setup=setup,
        teardown=lambda namespace: teardown(),
    )


def _run_python(example: Example) -> None:
    source = str(example.parsed)
    file = _FILE.match(source)
    if file is None:
        before = Path.cwd()
        os.chdir(_folder(example))  # for what it saves
        try:
            PythonEvaluator()(example)
        finally:
            os.chdir(before)
        return
    path = _folder(example) / file[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, "utf-8")


def _run_console(example: Example) -> None:
    if _INSTALLS.search(str(example.parsed)):
        raise ValueError("A block that installs or calls nox is not run here: skip it, and say so.")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
        cwd=_folder(example),
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    told = _OUTPUT.match(example.document.text, example.region.end)
    if told is not None and told[1].strip() != done.stdout.strip():
        raise AssertionError(
            f"the page says that it prints\n{told[1]}\nbut it prints\n{done.stdout}"
        )


def _hidden_blocks(document: Document) -> Iterator[Region]:
    """Python that readers need not see: ``<!--- hidden: python`` to ``-->``."""
    for region in DirectiveInHTMLCommentLexer("hidden", "python")(document):
        yield Region(region.start, region.end, region.lexemes["source"], PythonEvaluator())


def _skips_have_reasons(document: Document) -> Iterator[Region]:
    for region in DirectiveInHTMLCommentLexer("skip")(document):
        if not re.fullmatch(r'next "[^"]{10,}"', str(region.lexemes["arguments"]).strip()):
            raise ValueError(
                f"{document.path}: say why a block is not run, as in "
                f'<!--- skip: next "needs a card" -->, not {region.lexemes["arguments"]!r}.'
            )
    return iter(())


def _folder(example: Example) -> Path:
    """Where a page's files are."""
    name = example.path
    if name not in _folders:
        _folders[name] = tempfile.TemporaryDirectory(prefix="swap-docs-")
    return Path(_folders[name].name)
