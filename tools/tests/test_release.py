# SPDX-License-Identifier: Apache-2.0
"""Releases, on a copy of the repository's own packages."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement

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


def nothing_unreleased(root: Path, *names: str) -> None:
    for name in names:
        settle(root, name, "")
    git(root, "commit", "-qam", "nothing unreleased", "--allow-empty")


def refusal(root: Path, name: str, version: str) -> str:
    """Release it, or return why not, and which files were written nevertheless."""
    before = snapshot(root)
    try:
        release(root, name, version, DATE)
    except ReleaseError as error:
        written = [file for file, text in snapshot(root).items() if before.get(file) != text]
        return f"{error}{written or ''}"
    return ""


def snapshot(root: Path) -> dict[str, str]:
    return {str(f): f.read_text() for f in root.rglob("*") if f.is_file() and ".git" not in f.parts}


def settings(root: Path, name: str) -> dict[str, Any]:
    return tomllib.loads((root / "packages" / name / "pyproject.toml").read_text())


def requirements(root: Path, name: str) -> list[str]:
    return settings(root, name)["project"]["dependencies"]


def needed_to_run(root: Path, name: str) -> set[str]:
    """Which of the others it needs when it is installed, with all extras."""
    project = settings(root, name)["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = itertools.chain(project["dependencies"], *extras)
    return {Requirement(line).name for line in lines} & set(NAMES) - {name}


def unreleased(root: Path, name: str) -> dict[str, str]:
    return Changelog.parse((root / "packages" / name / "CHANGELOG.md").read_text()).entries


def test_version_and_changelog(copy: Path) -> None:
    nothing_unreleased(copy, "swap-core")
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
    nothing_unreleased(copy, "swap-core", "swap-mindspore")
    release(copy, "swap-torch", "0.2.0", DATE)
    extras = settings(copy, "swap-testkit")["project"]["optional-dependencies"]
    assert extras["torch"] == ["swap-torch>=0.2,<0.3"]
    assert unreleased(copy, "swap-testkit")["Changed"] == "- Needs swap-torch 0.2."
    git(copy, "commit", "-qam", "swap-torch 0.2.0")
    release(copy, "swap-testkit", "0.2.0", DATE)
    assert "swap-testkit>=0.2,<0.3" in settings(copy, "swap-torch")["dependency-groups"]["test"]


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_for_each_range_that_is_published(copy: Path, name: str) -> None:
    nothing_unreleased(copy, *(other for other in NAMES if other != name))
    before = {other: settings(copy, other)["project"] for other in NAMES}
    told = release(copy, name, "0.2.0", DATE)
    for other in set(NAMES) - {name}:
        moved = settings(copy, other)["project"] != before[other]
        assert moved == (name in needed_to_run(copy, other))
        expected = {"Changed": f"- Needs {name} 0.2."} if moved else {}
        assert unreleased(copy, other) == expected
        assert any(f"{other} now needs" in line and "release it" in line for line in told) == moved


def test_only_ranges_that_exclude_it_move(copy: Path) -> None:
    project = copy / "packages/swap-torch/pyproject.toml"
    text = project.read_text().replace("swap-core>=0.1,<0.2", "swap-core>=0.1")
    old = "\"swap-core >=0.1,<0.2 ; os_name == 'posix'\""
    groups = f'more = []\ntest = [{old}, {{ include-group = "more" }}, "expecttest"'
    project.write_text(text.replace('test = ["expecttest"', groups))
    git(copy, "commit", "-qam", "range")
    release(copy, "swap-core", "0.2.0", DATE)
    assert "swap-core>=0.1" in requirements(copy, "swap-torch")
    moved = Requirement(settings(copy, "swap-torch")["dependency-groups"]["test"][0])
    assert (str(moved.specifier), str(moved.marker)) == ("<0.3,>=0.2", 'os_name == "posix"')
    assert list(unreleased(copy, "swap-torch")) == ["Added"]


@pytest.mark.parametrize("name", NAMES)
def test_what_it_needs_to_run_is_released_first(copy: Path, name: str) -> None:
    """However it begins, following what the warnings say ends, and all that is out stays so."""
    steps = [(name, "0.2.0")]
    done = []
    while steps:
        needed = [o for o in needed_to_run(copy, steps[-1][0]) if unreleased(copy, o)]
        told = "\n".join(release(copy, *steps[-1], DATE))
        warned = re.findall(r"WARNING: .* run first: nox -s release -- (\S+) (\S+)$", told, re.M)
        assert {other for other, _ in warned} == set(needed)
        if warned:
            git(copy, "checkout", "-q", ".")
            assert warned[0][0] not in done
            steps.append(warned[0])
        else:
            git(copy, "commit", "-qam", "release")
            done.append(steps.pop()[0])
            assert not [other for other in done if unreleased(copy, other)]
    assert set(done) >= {name, *needed_to_run(copy, name)}


def test_the_commands_that_are_documented(copy: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    commands = re.findall(r"^python3 -m nox -s release -- (\S+) (\S+)$", text, re.M)
    assert sorted(name for name, _ in commands) == NAMES
    for name, version in commands:
        release(copy, name, version, DATE)
        git(copy, "commit", "-qam", f"{name} {version}")
    assert not [name for name in NAMES if unreleased(copy, name)]


@pytest.mark.parametrize(
    ("entries", "command"),
    [
        ("### Fixed\n\n- It.\n", "nox -s release -- swap-core 0.1.1"),
        ("### Security\n\n- It.\n", "nox -s release -- swap-core 0.1.1"),
        ("### Fixed\n\n- It.\n\n### Removed\n\n- It.\n", "nox -s release -- swap-core 0.2.0"),
    ],
)
def test_the_warning_names_a_version_that_follows(copy: Path, entries: str, command: str) -> None:
    settle(copy, "swap-core", entries)
    git(copy, "commit", "-qam", "log")
    words = "swap-torch needs swap-core to run, and the changelog of swap-core 0.1.0 has unreleased"
    told = release(copy, "swap-torch", "0.2.0", DATE)
    assert re.search(f"WARNING: {words}.*{command}$", told[0])
    git(copy, "checkout", "-q", ".")
    assert main([*command.split()[-2:], "--root", str(copy)]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_refused_before_anything_is_written(copy: Path, name: str) -> None:
    """Whichever changelog cannot be read."""
    nothing_unreleased(copy, *needed_to_run(copy, name))
    refused = set()
    for other in NAMES:
        log = copy / "packages" / other / "CHANGELOG.md"
        log.write_text(log.read_text().replace("## [0.1.0] - 2026-11-30", "## 0.1.0"))
        git(copy, "commit", "-qam", "malformed")
        if words := refusal(copy, name, "0.2.0"):
            expected = (
                f"CHANGELOG.md of {other}: '## 0.1.0' must be like '## [0.1.0] - 2026-11-30'."
            )
            assert words == expected
            refused.add(other)
        git(copy, "reset", "-q", "--hard", "HEAD~1")
    assert refused >= {name, *needed_to_run(copy, name)}


def test_an_entry_without_a_blank_line_before_it(copy: Path) -> None:
    settle(copy, "swap-torch", "### Changed\n- Something.\n")
    git(copy, "commit", "-qam", "log")
    release(copy, "swap-core", "0.2.0", DATE)
    assert unreleased(copy, "swap-torch") == {"Changed": "- Something.\n- Needs swap-core 0.2."}


@pytest.mark.parametrize(
    "date", ["soon", "", "2027-1-31", "20270131", "2027-W04-7", "2027-02-29", "31.01.2027"]
)
def test_a_date_that_is_none(copy: Path, date: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(copy)
    assert main(["swap-core", "0.2.0", "--root", str(copy), "--date", date]) == 2
    words = f"release: {date!r} is no date; give one as YYYY-MM-DD, such as "
    assert words in capsys.readouterr().err
    assert snapshot(copy) == before


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
    ("entries", "words"),
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
def test_a_changelog_out_of_order(copy: Path, entries: str, words: str) -> None:
    settle(copy, "swap-torch", entries)
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
    nothing_unreleased(copy, "swap-core")
    assert main(["swap-torch", "nonsense", "--root", str(copy)]) == 2
    assert "release: 'nonsense' is no version" in capsys.readouterr().err
    assert main(["swap-torch", "0.2.0", "--root", str(copy), "--date", DATE]) == 0
    assert "swap-torch 0.1.0 -> 0.2.0" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_changelogs_of_today_are_in_order(name: str) -> None:
    assert Changelog.parse((ROOT / "packages" / name / "CHANGELOG.md").read_text("utf-8"))
