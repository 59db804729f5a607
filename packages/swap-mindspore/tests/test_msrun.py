# SPDX-License-Identifier: Apache-2.0
"""How ranks are run under msrun, whose part a script plays here."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from swap_testkit.mindspore.launch import FOLDER_VARIABLE, JOINED, RankFailedError, run_under_msrun

MSRUN = f"""#!{sys.executable}
import os, pathlib, signal
folder = pathlib.Path(os.environ["{FOLDER_VARIABLE}"])
with (folder / "tried").open("a") as file:
    file.write(".")
tried = (folder / "tried").read_text()
if (folder / "meets").exists():
    (folder / "{JOINED}0").touch()
if len(tried) <= int((folder / "crashes").read_text()):
    print(f"crash {{len(tried)}}", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a launch whose msrun is the script above."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "msrun").write_text(MSRUN)
    (programs / "msrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    return tmp_path


def run(folder: Path, *, crashes: int, meets: bool) -> int:
    """How often it was started."""
    (folder / "crashes").write_text(str(crashes))
    if meets:
        (folder / "meets").touch()
    try:
        run_under_msrun(Path("script.py"), folder=folder, nproc=2, timeout=60)
    finally:
        tried = len((folder / "tried").read_text())
    return tried


def test_ranks_that_crash_before_they_meet_are_run_once_more(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run(folder, crashes=1, meets=False) == 2
    assert "no rank met the others" in caplog.text
    assert "crash 1" in caplog.text


def test_not_more_often(folder: Path) -> None:
    with pytest.raises(RankFailedError, match="crash 2"):
        run(folder, crashes=9, meets=False)
    assert len((folder / "tried").read_text()) == 2


def test_ranks_that_crash_later_are_told(folder: Path) -> None:
    with pytest.raises(RankFailedError, match="crash 1"):
        run(folder, crashes=1, meets=True)
    assert len((folder / "tried").read_text()) == 1


def test_ranks_that_do_not_crash_are_run_once(folder: Path) -> None:
    assert run(folder, crashes=0, meets=False) == 1
