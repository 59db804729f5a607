# SPDX-License-Identifier: Apache-2.0
"""Use the packages of this checkout without installing them.

Importing needs a path, and finding adapters needs the entry points that an installation would write
down; so they are written to a folder that is on the path too. Needs nothing but Python.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["path_of_checkout"]

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("swap-core", "swap-torch", "swap-testkit")


def path_of_checkout(folder: Path) -> str:
    """Write what an installation would to ``folder``, and give the ``PYTHONPATH`` to use."""
    paths = [str(folder)]
    for name in DISTRIBUTIONS:
        project = ROOT / "packages" / name
        module = name.replace("-", "_")
        about = (project / "src" / module / "__about__.py").read_text()
        version = _only(r'__version__ = "(.+)"', about)
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(_entry_points(project / "pyproject.toml"))
        paths.append(str(project / "src"))
    return os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _entry_points(file: Path) -> str:
    """As ``entry_points.txt`` has them. Read by hand: Python 3.10 has no TOML."""
    told, inside = [], False
    for line in file.read_text().splitlines():
        if line.startswith("["):
            match = re.fullmatch(r'\[project\.entry-points\."?([\w.]+?)"?\]', line.strip())
            inside = match is not None
            told += [f"[{match[1]}]"] if match else []
        elif inside and "=" in line:
            key, value = (part.strip().strip('"') for part in line.split("=", 1))
            told.append(f"{key} = {value}")
    return "\n".join(told) + "\n"


def _only(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]
