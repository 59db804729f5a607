# SPDX-License-Identifier: Apache-2.0
"""Compiling on first use, the cache, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from swap_testkit import cli
from swap_testkit.torch.simulator import BuildError
from swap_testkit.torch.simulator import build as module
from swap_testkit.torch.simulator.build import CACHE_VARIABLE, build, recipe


@pytest.fixture(autouse=True)
def _forget_the_recipe() -> Iterator[None]:
    recipe.cache_clear()
    yield
    recipe.cache_clear()


def test_the_place_names_python_torch_and_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    first = recipe().library
    assert first.is_relative_to(tmp_path)
    assert torch.__version__ in first.parent.name
    assert str(sys.implementation.cache_tag) in first.parent.name
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "changed.cpp").write_text("int changed;")
    monkeypatch.setattr(module, "_SOURCES", sources)
    recipe.cache_clear()
    assert recipe().library != first


def test_the_users_cache_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recipe().library.parent.parent == tmp_path / "swap-testkit"


def test_nothing_is_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    library = build()
    monkeypatch.setattr(module, "_compile", None)
    assert build() == library


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["simulator", "build"]) == 2
    told = capsys.readouterr().err
    assert "found CXX=no-such-compiler, which is no program" in told
    assert "apt-get install g++" in told
    assert "CpuAsDevice" in told
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    recipe.cache_clear()
    with pytest.raises(BuildError, match="none of c"):
        build()


COMPILER = """#!{python}
import sys, time, pathlib
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
with open({log!r}, "a") as log:
    log.write(out.name + "\\n")
time.sleep(0.3)
if {fails} and "-c" in sys.argv:
    sys.exit("a word of the compiler")
out.write_text("built")
"""


def stand_in(folder: Path, *, fails: bool = False) -> Path:
    """A compiler that writes down what it is asked for."""
    compiler = folder / "compiler"
    compiler.write_text(
        COMPILER.format(python=sys.executable, log=str(folder / "log"), fails=fails)
    )
    compiler.chmod(0o755)
    return compiler


def test_processes_do_not_race(tmp_path: Path) -> None:
    program = "from swap_testkit.torch.simulator.build import build; print(build().read_text())"
    environment = {
        **os.environ,
        CACHE_VARIABLE: str(tmp_path / "cache"),
        "CXX": str(stand_in(tmp_path)),
    }
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in processes] == [b"built\n"] * 2
    made = (tmp_path / "log").read_text().split()
    assert sorted(made) == [
        "libswap_simulator.so",
        "unity_operators.cpp.o",
        "unity_runtime.cpp.o",
    ]


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(stand_in(tmp_path, fails=True)))
    with pytest.raises(BuildError, match=r"(?s)Supported are torch .*\na word of the compiler"):
        build()
    assert not recipe().is_built
    assert list(recipe().library.parent.glob("tmp*")) == []


def test_the_sources_come_with_the_package() -> None:
    folder = files("swap_testkit.torch.simulator") / "csrc"
    names = {file.name for file in folder.iterdir()}
    assert {"unity_operators.cpp", "unity_runtime.cpp", "schedule.h"} <= names
    for unit in ("unity_operators.cpp", "unity_runtime.cpp"):
        text = (folder / unit).read_text()
        included = {line.split('"')[1] for line in text.splitlines() if line.startswith("#include")}
        assert included <= names


def test_info_and_selftest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulator", "info"]) == 0
    told = capsys.readouterr().out
    assert "compiled  yes" in told
    assert CACHE_VARIABLE in told
    assert cli.main(["simulator", "build"]) == 0
    assert capsys.readouterr().out.strip() in told
    assert cli.main(["simulator", "selftest"]) == 0
    assert capsys.readouterr().out.count("ok    ") == 5
