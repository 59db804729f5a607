# SPDX-License-Identifier: Apache-2.0
"""Releases, on a copy of the repository's own packages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from changelog import Changelog  # noqa: E402
from release import ReleaseError, main, release  # noqa: E402

DATE = "2027-01-31"
NAMES = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The settings, versions and changelogs, each at 0.1.0 with one unreleased addition."""
    for name in NAMES:
        module = name.replace("-", "_")
        for file in ("pyproject.toml", "CHANGELOG.md", f"src/{module}/__about__.py"):
            target = tmp_path / "packages" / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "packages" / name / file, target)
        settle(tmp_path, name, "### Added\n\n- Something.\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def settle(root: Path, name: str, unreleased: str) -> None:
    folder = root / "packages" / name
    about = folder / "src" / name.replace("-", "_") / "__about__.py"
    about.write_text(re.sub(r'"\d[^"]*"', '"0.1.0"', about.read_text()))
    log = f"# Changelog\n\n## [Unreleased]\n\n{unreleased}\n## [0.1.0] - 2026-11-30\n\n- First.\n"
    (folder / "CHANGELOG.md").write_text(log)
    project = folder / "pyproject.toml"
    ranges = re.sub(r'"(swap-[a-z]+)>=[^"]*"', r'"\1>=0.1,<0.2"', project.read_text())
    project.write_text(ranges)


def snapshot(root: Path) -> dict[str, str]:
    return {str(f): f.read_text() for f in root.rglob("*") if f.is_file() and ".git" not in f.parts}


def requirements(root: Path, name: str) -> list[str]:
    return tomllib.loads((root / "packages" / name / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]


def test_version_and_changelog(copy: Path) -> None:
    before = snapshot(copy)
    release(copy, "swap-torch", "0.2.0", DATE)
    folder = copy / "packages" / "swap-torch"
    assert '__version__ = "0.2.0"' in (folder / "src/swap_torch/__about__.py").read_text()
    written = (folder / "CHANGELOG.md").read_text()
    assert f"## [Unreleased]\n\n## [0.2.0] - {DATE}\n\n### Added\n\n- Something.\n" in written
    assert Changelog.parse(written).entries == {}
    after = snapshot(copy)
    changed = {name for name in before if before[name] != after[name]}
    assert {Path(name).parent.name for name in changed} >= {"swap_torch", "swap-torch"}
    assert not [name for name in changed if "swap-core/" in name or "swap-mindspore/" in name]


def test_ranges_of_dependents_move(copy: Path) -> None:
    told = release(copy, "swap-core", "0.2.0", DATE)
    assert "swap-core>=0.2,<0.3" in requirements(copy, "swap-torch")
    assert "swap-core>=0.2,<0.3" in requirements(copy, "swap-mindspore")
    log = Changelog.parse((copy / "packages/swap-torch/CHANGELOG.md").read_text())
    assert log.entries["Changed"] == "- Needs swap-core 0.2."
    assert log.entries["Added"] == "- Something."
    assert any("swap-torch now needs" in line for line in told)


def test_ranges_in_groups_and_extras_move_too(copy: Path) -> None:
    release(copy, "swap-torch", "0.2.0", DATE)
    settings = tomllib.loads((copy / "packages/swap-testkit/pyproject.toml").read_text())
    assert settings["project"]["optional-dependencies"]["torch"] == ["swap-torch>=0.2,<0.3"]


def test_a_fix_leaves_ranges_alone(copy: Path) -> None:
    settle(copy, "swap-core", "### Fixed\n\n- It.\n")
    git(copy, "commit", "-qam", "fix")
    release(copy, "swap-core", "0.1.1", DATE)
    assert "swap-core>=0.1,<0.2" in requirements(copy, "swap-torch")


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("swap-tensorflow", "0.2.0", "is no distribution here; give one of swap-core"),
        ("swap-torch", "two", "is no version; give one of ['0.1.1', '0.2.0', '1.0.0']"),
        ("swap-torch", "0.1.0", "does not follow swap-torch 0.1.0"),
        ("swap-torch", "0.0.9", "does not follow"),
        ("swap-torch", "0.3.0", "does not follow"),
        ("swap-torch", "0.2.0rc1", "does not follow"),
        ("swap-torch", "0.2", "does not follow"),
        ("swap-torch", "0.1.1", "fixes only, and the changelog of swap-torch has Added"),
    ],
)
def test_refused(copy: Path, name: str, version: str, words: str) -> None:
    before = snapshot(copy)
    with pytest.raises(ReleaseError, match=re.escape(words)):
        release(copy, name, version, DATE)
    assert snapshot(copy) == before


@pytest.mark.parametrize(
    ("unreleased", "words"),
    [
        ("", "nothing unreleased"),
        ("- At the top.\n", "must be under one of Added"),
        ("### Improved\n\n- It.\n", "'### Improved' must be one of Added"),
        ("### Added\n\nIt.\n", "there must be a list"),
        ("## [Unreleased]\n", "must be ## [Unreleased], once"),
        ("## [0.1.0] - 2026-11-30\n", "each version once"),
        ("## 0.1.5\n", "must be like"),
        ("## [0.1.5] - 2026-12-01\n", "0.1.5 as the latest release, but __about__.py says 0.1.0"),
    ],
)
def test_a_changelog_out_of_order(copy: Path, unreleased: str, words: str) -> None:
    settle(copy, "swap-torch", unreleased)
    git(copy, "commit", "-qam", "log")
    before = snapshot(copy)
    with pytest.raises(ReleaseError, match=re.escape(words)):
        release(copy, "swap-torch", "0.2.0", DATE)
    assert snapshot(copy) == before


def test_what_is_not_committed_is_refused(copy: Path) -> None:
    log = copy / "packages/swap-torch/CHANGELOG.md"
    log.write_text(log.read_text().replace("Something", "Something else"))
    with pytest.raises(ReleaseError, match="not committed yet: packages/swap-torch/CH"):
        release(copy, "swap-torch", "0.2.0", DATE)


def test_a_range_that_excludes_what_is_here(copy: Path) -> None:
    project = copy / "packages/swap-torch/pyproject.toml"
    project.write_text(project.read_text().replace("swap-core>=0.1,<0.2", "swap-core>=0.3,<0.4"))
    git(copy, "commit", "-qam", "range")
    words = re.escape("needs swap-core<0.4,>=0.3, but swap-core here is 0.1.0")
    with pytest.raises(ReleaseError, match=words):
        release(copy, "swap-torch", "0.2.0", DATE)


def test_the_command_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swap-torch", "nonsense", "--root", str(copy)]) == 2
    assert "release: 'nonsense' is no version" in capsys.readouterr().err
    assert main(["swap-torch", "0.2.0", "--root", str(copy), "--date", DATE]) == 0
    assert "swap-torch 0.1.0 -> 0.2.0" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_changelogs_of_today_are_in_order(name: str) -> None:
    assert Changelog.parse((ROOT / "packages" / name / "CHANGELOG.md").read_text("utf-8"))
