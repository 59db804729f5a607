# SPDX-License-Identifier: Apache-2.0
"""Give one distribution its next version: ``nox -s release -- swap-torch 0.2.0``.

Checks everything, then writes the version, dates the changelog, and moves the ranges of the
distributions that depend on it where they exclude the new version. Commit, tag and upload it
yourself.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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

    def requirements(self) -> Iterator[Requirement]:
        """Everything it needs: to run, with extras, and to be tested."""
        settings = tomllib.loads(self.project.read_text("utf-8"))
        groups = [
            settings["project"]["dependencies"],
            *settings["project"].get("optional-dependencies", {}).values(),
            *settings.get("dependency-groups", {}).values(),
        ]
        yield from (Requirement(line) for group in groups for line in group)


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
    chosen = every[name]
    dependents = [each for each in every.values() if _needs(each, name)]
    _check_clean(root, [chosen, *dependents])
    changelog = _read_changelog(chosen)
    version = _next_version(chosen, wanted, changelog)
    _check_own_ranges(chosen, every)

    writes = {
        chosen.about: _VERSION.sub(
            f'__version__ = "{version}"', chosen.about.read_text("utf-8"), count=1
        ),
        chosen.changelog: changelog.released(str(version), date),
    }
    told = [f"{name} {chosen.version()} -> {version}"]
    for each in dependents:
        moved = _moved_ranges(each, name, version)
        if moved is not None:
            writes[each.project] = moved
            entry = f"Needs {name} {version.major}.{version.minor}."
            writes[each.changelog] = _read_changelog(each).with_change(entry)
            told.append(f"{each.name} now needs {_range(version)} of {name}: release it too")
    for file, text in writes.items():
        file.write_text(text, "utf-8")
    unreleased = [
        each.name
        for each in every.values()
        if _needs(chosen, each.name) and _read_changelog(each).entries
    ]
    if unreleased:
        told.append(f"{', '.join(unreleased)}: unreleased changes; release first what {name} uses")
    told.append(f"next: git commit, git tag {name}-{version}, nox -s build, upload dist/{name}*")
    return told


def _distributions(root: Path) -> dict[str, Distribution]:
    folders = sorted(file.parent for file in root.glob("packages/*/pyproject.toml"))
    return {folder.name: Distribution(folder.name, folder) for folder in folders}


def _needs(each: Distribution, name: str) -> bool:
    return any(requirement.name == name for requirement in each.requirements())


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
    patch = f"{now.major}.{now.minor}.{now.micro + 1}"
    minor = f"{now.major}.{now.minor + 1}.0"
    accepted = [patch, minor, f"{now.major + 1}.0.0"]
    try:
        version = Version(wanted)
    except InvalidVersion as error:
        raise ReleaseError(f"{wanted!r} is no version; give one of {accepted}.") from error
    if wanted not in accepted:
        raise ReleaseError(f"{wanted} does not follow {chosen.name} {now}; give one of {accepted}.")
    if not changelog.entries:
        raise ReleaseError(f"the changelog of {chosen.name} has nothing unreleased to release.")
    more = [kind for kind in changelog.entries if kind not in ("Fixed", "Security")]
    if wanted == patch and more:
        raise ReleaseError(
            f"{wanted} would be for fixes only, and the changelog of {chosen.name} has "
            f"{', '.join(more)}; give {minor}."
        )
    return version


def _check_own_ranges(chosen: Distribution, every: dict[str, Distribution]) -> None:
    for requirement in chosen.requirements():
        other = every.get(requirement.name)
        if other is None or other is chosen or other.version() in requirement.specifier:
            continue
        raise ReleaseError(
            f"{chosen.name} needs {requirement}, but {other.name} here is {other.version()}, with "
            f"which it is tested. Correct the range in {chosen.project.name}."
        )


def _moved_ranges(each: Distribution, name: str, version: Version) -> str | None:
    """The settings of ``each`` with ranges that admit ``version``; None if they do already."""
    text = each.project.read_text("utf-8")
    for requirement in each.requirements():
        if (
            requirement.name == name
            and requirement.specifier
            and version not in requirement.specifier
        ):
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            old = re.compile(rf'"{re.escape(name + extras)}\s*[<>=~!][^"]*"')
            text = old.sub(f'"{name}{extras}{_range(version)}"', text)
    return text if text != each.project.read_text("utf-8") else None


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
