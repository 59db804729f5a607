# SPDX-License-Identifier: Apache-2.0
"""Compile the simulated accelerator on first use, into a cache.

The result is bound to the torch version, so it cannot come with the package. It needs a C++
compiler and nothing else: no ninja, no Python headers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

__all__ = ["CACHE_VARIABLE", "BuildError", "Recipe", "build", "find_compiler", "recipe"]

CACHE_VARIABLE = "SWAP_TESTKIT_CACHE"
"""Environment variable: the folder for compiled code."""

_SOURCES = Path(__file__).parent / "csrc"
_UNITS = ("unity_operators.cpp", "unity_runtime.cpp")
_SUPPORTED = "2.10 to 2.14"
"""Versions with which it was tested."""
_COMPILERS = ("c++", "g++", "clang++")
_log = logging.getLogger(__name__)


class BuildError(OSError):
    """The simulated accelerator cannot be compiled here. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How it is compiled here, and where the result goes."""

    compiler: str
    flags: tuple[str, ...]
    library: Path

    @property
    def is_built(self) -> bool:
        """Whether the result is in the cache."""
        return self.library.is_file()


def find_compiler() -> str:
    """The C++ compiler: that of the variable ``CXX``, or the first of c++, g++ and clang++.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    looked = f"CXX={wanted}, which is no program" if wanted else f"none of {', '.join(_COMPILERS)}"
    raise BuildError(
        f"The simulated accelerator is compiled on first use and needs a C++20 compiler; found "
        f"{looked}. Install one (apt-get install g++, dnf install gcc-c++, xcode-select "
        f"--install), or set CXX to the path of yours. Without one, "
        f"swap_testkit.torch.CpuAsDevice needs no compiler."
    )


@cache
def recipe() -> Recipe:
    """How to compile for this Python and this torch.

    Raises:
        BuildError: no compiler, or a platform that is not supported.
    """
    if os.name != "posix":
        raise BuildError(
            f"The simulated accelerator is not supported on {sys.platform}; use Linux or macOS, or "
            f"swap_testkit.torch.CpuAsDevice."
        )
    compiler = find_compiler()
    home = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = (
        "-std=c++20",
        # More would cost more to compile than it saves: the work is done by torch's own kernels.
        "-O1",
        # As torch itself is: some of its objects have other fields without it.
        "-DNDEBUG",
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{home / 'include'}",
        f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
    )
    digest = hashlib.sha256()
    tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}-abi{abi}"
    for part in (tag, str(torch.version.git_version), compiler, *flags):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = _cache_folder() / f"simulator-{tag}-{digest.hexdigest()[:16]}"
    return Recipe(compiler, flags, folder / "libswap_simulator.so")


def build() -> Path:
    """Compile, unless that was done before; several processes may call it at once.

    Returns:
        The library, for ``torch.ops.load_library``.

    Raises:
        BuildError: no compiler, or it failed; with its words.
    """
    how = recipe()
    if how.is_built:
        return how.library
    how.library.parent.mkdir(parents=True, exist_ok=True)
    with _locked(how.library.with_suffix(".lock")):
        # Another process may have been faster.
        if not how.is_built:
            started = perf_counter()
            _log.warning("compiling the simulated accelerator (once per torch version) ...")
            _compile(how)
            _log.warning("compiled in %.0f s: %s", perf_counter() - started, how.library)
    return how.library


def _cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "swap-testkit"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock between processes; the system lets go of it if this one dies."""
    import fcntl  # not on every platform that this module may be imported on

    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(how: Recipe) -> None:
    with tempfile.TemporaryDirectory(dir=how.library.parent) as scratch:
        objects = [Path(scratch) / f"{unit}.o" for unit in _UNITS]
        compilers = [
            _start([how.compiler, *how.flags, "-c", str(_SOURCES / unit), "-o", str(target)])
            for unit, target in zip(_UNITS, objects, strict=True)
        ]
        _finish(compilers)
        linked = Path(scratch) / how.library.name
        link = [how.compiler, "-shared", *map(str, objects), "-o", str(linked), *_linked()]
        _finish([_start(link)])
        # In one move: nobody ever sees half a file.
        linked.replace(how.library)


def _linked() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{libraries}", "-lc10", "-ltorch_cpu", *undefined]


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _finish(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process, output in [(process, process.communicate()[0]) for process in processes]:
        if process.returncode != 0:
            command = process.args if isinstance(process.args, list) else [str(process.args)]
            raise BuildError(
                f"Compiling the simulated accelerator for torch {torch.__version__} failed. "
                f"Supported are torch {_SUPPORTED} with a C++20 compiler (such as GCC 12).\n"
                f"{' '.join(map(str, command))}\n{output[-4000:]}"
            )
