# SPDX-License-Identifier: Apache-2.0
"""Give one distribution its next version: ``nox -s release -- swap-torch 0.2.0``.

Checks everything, then writes the version, dates the changelog, and moves the ranges of the
distributions that depend on it where they exclude the new version. Warns if what it needs to run
has something unreleased. Commit, tag and upload it yourself.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found]  # Python 3.11, as developers have
from changelog import Changelog
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

__all__ = ["ReleaseError", "main", "release"]


class ReleaseError(Exception):
    """The release is refused; nothing was written."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """One of the packages in the repository."""

    name: str
    folder: Path

    @property
    def project(self) -> Path:
        """Its settings."""
        return self.folder / "pyproject.toml"

    @property
    def changelog(self) -> Path:
        """Its changelog."""
        return self.folder / "CHANGELOG.md"

    @property
    def about(self) -> Path:
        """The file that holds its version."""
        return self.folder / "src" / self.name.replace("-", "_") / "__about__.py"

    def version(self) -> Version:
        """The version that the file says."""
        return Version(_VERSION.search(self.about.read_text("utf-8"))[1])  # type: ignore[index]

    def to_run(self) -> list[str]:
        """What it needs to run, also with extras: this is published with it."""
        project = self._settings()["project"]
        return _joined(project["dependencies"], project.get("optional-dependencies", {}))

    def to_develop(self) -> list[str]:
        """What it needs besides to be tested: this is not published."""
        return _joined([], self._settings().get("dependency-groups", {}))

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = tomllib.loads(self.project.read_text("utf-8"))
        return settings


def _joined(lines: list[str], groups: dict[str, list[Any]]) -> list[str]:
    """All requirements, without what a group takes from another group."""
    every = chain(lines, *groups.values())
    return [line for line in every if isinstance(line, str)]


_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.M)


def release(root: Path, name: str, wanted: str, date: str) -> list[str]:
    """Write a release of distribution ``name``, after checking that it can be one.

    Args:
        root: The repository.
        name: Which distribution.
        wanted: The new version.
        date: Of the release, as YYYY-MM-DD.

    Returns:
        What was done, and what is left to do.

    Raises:
        ReleaseError: it cannot; nothing was written.
    """
    every = _distributions(root)
    if name not in every:
        raise ReleaseError(f"{name!r} is no distribution here; give one of {', '.join(every)}.")
    _check_date(date)
    chosen = every[name]
    needed = _needed_to_run(chosen, every)
    dependents = [each for each in every.values() if each is not chosen and _needs(each, name)]
    _check_clean(root, [chosen, *needed, *dependents])
    changelog = _read_changelog(chosen)
    version = _next_version(chosen, wanted, changelog)
    _check_own_ranges(chosen, every)
    warnings = _told_of_unreleased(chosen, needed)

    writes = {
        chosen.about: _VERSION.sub(
            f'__version__ = "{version}"', chosen.about.read_text("utf-8"), count=1
        ),
        chosen.changelog: changelog.released(str(version), date),
    }
    told = [*warnings, f"{name} {chosen.version()} -> {version}"]
    for each in dependents:
        writes |= _moved(each, name, version)
        told += _told_of_moved(each, name, version)
    told.append(f"next: git commit, git tag {name}-{version}, nox -s build, upload dist/{name}*")
    for file, text in writes.items():
        file.write_text(text, "utf-8")
    return told


def _check_date(date: str) -> None:
    try:
        if datetime.date.fromisoformat(date).isoformat() == date:
            return
    except ValueError:
        pass
    raise ReleaseError(f"{date!r} is no date; give one as YYYY-MM-DD, such as 2027-01-31.")


def _distributions(root: Path) -> dict[str, Distribution]:
    folders = sorted(file.parent for file in root.glob("packages/*/pyproject.toml"))
    return {folder.name: Distribution(folder.name, folder) for folder in folders}


def _needs(each: Distribution, name: str) -> bool:
    return any(Requirement(line).name == name for line in each.to_run() + each.to_develop())


def _needed_to_run(chosen: Distribution, every: dict[str, Distribution]) -> list[Distribution]:
    """The distributions that it needs to run, each after those that it needs itself."""
    seen = {chosen.name}
    found: list[Distribution] = []

    def visit(each: Distribution) -> None:
        for other in (Requirement(line).name for line in each.to_run()):
            if other in every and other not in seen:
                seen.add(other)
                visit(every[other])
                found.append(every[other])

    visit(chosen)
    return found


def _check_clean(root: Path, touched: Sequence[Distribution]) -> None:
    files = [str(f) for each in touched for f in (each.about, each.changelog, each.project)]
    command = ["git", "-C", str(root), "status", "--porcelain", "--", *files]
    dirty = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    if any(dirty):
        changed = ", ".join(line[3:] for line in dirty if line)
        raise ReleaseError(f"not committed yet: {changed}. Commit or undo that first.")


def _read_changelog(each: Distribution) -> Changelog:
    try:
        changelog = Changelog.parse(each.changelog.read_text("utf-8"))
    except ValueError as error:
        raise ReleaseError(f"{each.changelog.name} of {each.name}: {error}") from error
    if changelog.latest != str(each.version()):
        raise ReleaseError(
            f"{each.changelog.name} of {each.name} has {changelog.latest} as the latest release, "
            f"but {each.about.name} says {each.version()}. Let them agree first."
        )
    return changelog


def _next_version(chosen: Distribution, wanted: str, changelog: Changelog) -> Version:
    now = chosen.version()
    patch, minor = _patch(now), _minor(now)
    accepted = [patch, minor, f"{now.major + 1}.0.0"]
    try:
        version = Version(wanted)
    except InvalidVersion as error:
        raise ReleaseError(f"{wanted!r} is no version; give one of {accepted}.") from error
    if wanted not in accepted:
        raise ReleaseError(f"{wanted} does not follow {chosen.name} {now}; give one of {accepted}.")
    if not changelog.entries:
        raise ReleaseError(f"the changelog of {chosen.name} has nothing unreleased to release.")
    more = _more_than_fixes(changelog)
    if wanted == patch and more:
        raise ReleaseError(
            f"{wanted} would be for fixes only, and the changelog of {chosen.name} has "
            f"{', '.join(more)}; give {minor}."
        )
    return version


def _patch(now: Version) -> str:
    return f"{now.major}.{now.minor}.{now.micro + 1}"


def _minor(now: Version) -> str:
    return f"{now.major}.{now.minor + 1}.0"


def _more_than_fixes(changelog: Changelog) -> list[str]:
    return [kind for kind in changelog.entries if kind not in ("Fixed", "Security")]


def _check_own_ranges(chosen: Distribution, every: dict[str, Distribution]) -> None:
    for requirement in map(Requirement, chosen.to_run() + chosen.to_develop()):
        other = every.get(requirement.name)
        if other is None or other is chosen or other.version() in requirement.specifier:
            continue
        raise ReleaseError(
            f"{chosen.name} needs {requirement}, but {other.name} here is {other.version()}, with "
            f"which it is tested. Correct the range in {chosen.project.name}."
        )


def _told_of_unreleased(chosen: Distribution, needed: Sequence[Distribution]) -> list[str]:
    """What it needs to run should be out as it is here: it may use what is new in it."""
    told = []
    for each in needed:
        changelog, now = _read_changelog(each), each.version()
        if changelog.entries:
            following = _minor(now) if _more_than_fixes(changelog) else _patch(now)
            told.append(
                f"WARNING: {chosen.name} needs {each.name} to run, and the changelog of "
                f"{each.name} {now} has unreleased entries ({', '.join(changelog.entries)}), "
                f"which {chosen.name} may use. Unless it does not: undo this (git checkout .), and "
                f"run first: nox -s release -- {each.name} {following}"
            )
    return told


def _moved(each: Distribution, name: str, version: Version) -> dict[Path, str]:
    """The settings of ``each`` with ranges that admit ``version``, with an entry if users see it.

    Empty if the ranges admit it already.
    """
    writes = {}
    excluding = _excluding(each.to_run() + each.to_develop(), name, version)
    if excluding:
        text = each.project.read_text("utf-8")
        for line in excluding:
            moved = re.sub(r"[<>=~!][^;]*", _range(version), line, count=1)
            text = text.replace(f'"{line}"', f'"{moved}"')
        writes[each.project] = text
    if _excluding(each.to_run(), name, version):
        entry = f"Needs {name} {version.major}.{version.minor}."
        writes[each.changelog] = _read_changelog(each).with_change(entry)
    return writes


def _told_of_moved(each: Distribution, name: str, version: Version) -> list[str]:
    if _excluding(each.to_run(), name, version):
        return [f"{each.name} now needs {_range(version)} of {name}: release it too"]
    if _excluding(each.to_develop(), name, version):
        return [f"the tests of {each.name} now take {_range(version)} of {name}"]
    return []


def _excluding(lines: Sequence[str], name: str, version: Version) -> list[str]:
    """The requirements that are of ``name``, and do not admit ``version``."""
    needed = {line: Requirement(line) for line in lines}
    return [
        line for line, each in needed.items() if each.name == name and version not in each.specifier
    ]


def _range(version: Version) -> str:
    """Before 1.0 a minor version may break."""
    if version.major:
        return f">={version.major}.{version.minor},<{version.major + 1}"
    return f">=0.{version.minor},<0.{version.minor + 1}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, or 2 if the release is refused."""
    parser = argparse.ArgumentParser(prog="nox -s release --", description=__doc__)
    parser.add_argument("distribution", help="such as swap-torch")
    parser.add_argument("version", help="the new one, such as 0.2.0")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="repository")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parser.add_argument("--date", default=today, help="of the release (default: today)")
    options = parser.parse_args(arguments)
    try:
        told = release(options.root, options.distribution, options.version, options.date)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    print("\n".join(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
