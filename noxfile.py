# SPDX-License-Identifier: Apache-2.0
"""Development sessions: ``nox -l`` lists them, ``nox -r`` keeps and reuses their environments."""

from __future__ import annotations

import functools
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.virtualenv import VirtualEnv

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lint", "typecheck"]

ROOT = Path(__file__).parent
BUILT = ROOT / "dist"


@dataclass(frozen=True)
class Distribution:
    """A package of this repository."""

    name: str
    tested_with: tuple[str, ...] = ()
    """The other distributions that its tests need."""
    never_loads: tuple[str, ...] = ()
    """The modules that importing it must not load."""
    portable_extras: tuple[str, ...] = ()
    """The extras that can be installed on any machine."""

    @property
    def module(self) -> str:
        """The name to import."""
        return self.name.replace("-", "_")

    @property
    def folder(self) -> str:
        """The folder, relative to the root."""
        return f"packages/{self.name}"


# In dependency order.
DISTRIBUTIONS = (
    Distribution(
        "swap-core",
        never_loads=("torch", "mindspore", "numpy"),
        portable_extras=("plot",),
    ),
    Distribution(
        "swap-torch", tested_with=("swap-core", "swap-testkit"), never_loads=("mindspore",)
    ),
    Distribution(
        "swap-testkit",
        tested_with=("swap-core", "swap-torch"),
        never_loads=("mindspore",),
        portable_extras=("torch",),
    ),
    Distribution(
        "swap-mindspore", tested_with=("swap-core", "swap-testkit"), never_loads=("torch",)
    ),
    Distribution(
        "swap-mindformers",
        tested_with=("swap-core", "swap-testkit", "swap-mindspore"),
        never_loads=("torch", "mindformers"),
    ),
)
NEEDS_MINDSPORE = ("swap-mindspore", "swap-mindformers")
TORCH_DISTRIBUTIONS = tuple(each for each in DISTRIBUTIONS if each.name not in NEEDS_MINDSPORE)
"""What one environment with torch holds: MindSpore wants an older numpy, and its own gigabytes."""
MINDSPORE_DISTRIBUTIONS = tuple(each for each in DISTRIBUTIONS if each.name != "swap-torch")
"""What one environment with MindSpore holds."""
MINDSPORE_PAGES = ("docs/quickstart-mindspore.md", "packages/swap-mindspore/README.md")
"""Whose code needs MindSpore."""
TORCHTITAN_PAGES = ("docs/torchtitan.md",)
"""Whose code needs torchtitan."""
MINDSPORE_QUIET = {"GLOG_v": "3", "OMP_NUM_THREADS": "1"}
"""Errors only, and no threads that wait for each other over small tensors."""
MINDFORMERS = ("2.0.0", "2.1.0")
"""The releases that swap-mindformers is tested with; the last is the one that is installed."""

CHECK_IMPORT = """
import importlib, importlib.metadata, sys

module, distribution, *refused = sys.argv[1:]
found = importlib.import_module(module).__version__
installed = importlib.metadata.version(distribution)
if found != installed:
    sys.exit(f"{module}.__version__ is {found}, but {distribution} {installed} is installed")
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(refused))
if loaded:
    sys.exit(f"importing {module} loads {loaded}")
"""


# To compile all of a framework takes longer than to install it. What is imported is compiled, once.
PINNED = ("--no-compile", "-c", "constraints-dev.txt")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def removing_environment(
    function: Callable[[nox.Session], None],
) -> Callable[[nox.Session], None]:
    """Remove the environment of a session that passed, unless nox is to use it again (``-r``).

    Otherwise nox makes it anew the next time, and those of all sessions together take 25 GB.
    """

    @functools.wraps(function)
    def run(session: nox.Session) -> None:
        function(session)
        environment = session.virtualenv
        if isinstance(environment, VirtualEnv) and not environment.reuse_existing:
            shutil.rmtree(environment.location)

    return run


def group(name: str, folder: str = ".") -> tuple[str, ...]:
    """Return the requirements of a dependency group."""
    project = nox.project.load_toml(ROOT / folder / "pyproject.toml")
    return nox.project.dependency_groups(project, name)


def install(
    session: nox.Session, requirements: Iterable[str], distributions: Iterable[Distribution] = ()
) -> None:
    """Install distributions from their folders, and requirements, with the pinned torch."""
    folders = [distribution.folder for distribution in distributions]
    session.install(*PINNED, *folders, *requirements)


def install_mindformers(session: nox.Session) -> str:
    """Install MindFormers' files, the last release in the environment, and older ones beside it.

    Without what they depend on, which no index has in full; nothing imports the package.

    Returns:
        The older ones' packages, joined as in PATH.
    """
    *older, last = MINDFORMERS
    session.install("--no-deps", f"mindformers=={last}")
    folders = [Path(session.create_tmp()) / "mindformers" / release for release in older]
    for folder, release in zip(folders, older, strict=True):
        session.install(
            "--no-deps", "--upgrade", "--target", str(folder), f"mindformers=={release}"
        )
    return os.pathsep.join(str(folder / "mindformers") for folder in folders)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Test every distribution, each in its own environment."""
    for distribution in DISTRIBUTIONS:
        session.notify(f"tests-{distribution.name}")
    session.notify("align")
    session.notify("downstream")
    session.notify("integrations")
    session.notify("docs")


def run_tests(session: nox.Session, distribution: Distribution, *options: str) -> None:
    """Run the tests of one distribution, which is installed."""
    folder = f"{distribution.folder}/tests"
    quiet = dict(MINDSPORE_QUIET) if distribution.name in NEEDS_MINDSPORE else {}
    if distribution.name == "swap-mindformers":
        quiet["MINDFORMERS_FOLDERS"] = install_mindformers(session)
    session.run("pytest", folder, *options, env=quiet)
    if distribution.name == "swap-testkit":
        # In a process of their own: see the conftest there.
        session.run("pytest", f"{folder}/simulator", *options)


def run_blocks(session: nox.Session, framework: str, pages: Iterable[str]) -> None:
    """Run the code of pages, which is all of one framework."""
    session.install(*PINNED, *group("blocks"))
    session.run(
        *("pytest", "-p", f"blocks_{framework}", *pages),
        env={"PYTHONPATH": str(ROOT / "docs" / "checks"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )


def needed_by(distribution: Distribution) -> list[Distribution]:
    """A distribution, and those that its tests need beside it."""
    names = {distribution.name, *distribution.tested_with}
    return [each for each in DISTRIBUTIONS if each.name in names]


def add_tests_session(distribution: Distribution) -> None:
    """Register the session that tests one distribution."""

    def run(session: nox.Session) -> None:
        install(session, group("test", distribution.folder), needed_by(distribution))
        run_tests(session, distribution, *session.posargs)
        if distribution.name == "swap-mindspore":
            run_blocks(session, "mindspore", MINDSPORE_PAGES)

    run.__doc__ = f"Test {distribution.name} with only what it declares."
    nox.session(name=f"tests-{distribution.name}")(removing_environment(run))


for each in DISTRIBUTIONS:
    add_tests_session(each)


@nox.session
@removing_environment
def align(session: nox.Session) -> None:
    """Train every parallel scenario natively and swapped on gloo; rehearse the device check."""
    install(session, group("tools"), TORCH_DISTRIBUTIONS)
    scenarios = session.posargs or ("--scenario", "all")
    session.run(
        *("python", "-m", "swap_testkit", "align", *scenarios),
        *("--steps", "2", "--swap-times", "4", "--min-numel", "16", "--report", "build/align"),
    )
    if not session.posargs:
        session.run("pytest", "benchmarks/tests", env={"PYTHONPATH": "benchmarks"})
        rehearse_device_check(session)


@nox.session
@removing_environment
def align_mindspore(session: nox.Session) -> None:
    """Train every MindSpore scenario natively and swapped, on 1, 2 and 4 processes under msrun."""
    install(session, (), MINDSPORE_DISTRIBUTIONS)
    install_mindformers(session)
    scenarios = session.posargs or ("--scenario", "all")
    session.run(
        *("python", "-m", "swap_testkit", "align", "--framework", "mindspore", *scenarios),
        *("--steps", "2", "--swap-times", "4", "--min-numel", "16"),
        *("--report", "build/align_mindspore"),
        env=MINDSPORE_QUIET,
    )


@nox.session(venv_params=["--system-site-packages"], default=False)
def align_cards(session: nox.Session) -> None:
    """Train every scenario on the cards of this machine, with its torch; -- --allow-no-cards."""
    # --no-deps: torch is the machine's own, built for its cards.
    session.install("--no-deps", *(distribution.folder for distribution in TORCH_DISTRIBUTIONS))
    session.install("matplotlib", "numpy", "rich")
    session.run(
        *("python", "-m", "swap_testkit", "cards", "--steps", "8", "--report", "build/align_cards"),
        *session.posargs,
    )


@nox.session(venv_params=["--system-site-packages"], default=False)
def align_cards_mindspore(session: nox.Session) -> None:
    """Train the MindSpore scenarios on Ascend cards, and list the RFC's rows.

    With the machine's MindSpore, MindFormers and HyperParallel; ``-- --allow-no-cards`` only lists.
    """
    session.install("--no-deps", *(each.folder for each in MINDSPORE_DISTRIBUTIONS))
    session.install("matplotlib", "numpy<2", "rich")
    session.run(
        *("python", "-m", "swap_testkit", "cards", "--framework", "mindspore", "--steps", "8"),
        *("--report", "build/align_cards_mindspore"),
        *session.posargs,
    )


@nox.session
@removing_environment
def downstream(session: nox.Session) -> None:
    """Run the tests of a separate project that uses the built wheels."""
    session.install("build")
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    for distribution in TORCH_DISTRIBUTIONS:
        session.run(
            "python", "-m", "build", "--wheel", "--outdir", str(wheels), distribution.folder
        )
    session.install(*PINNED, *map(str, wheels.iterdir()), "pytest")
    # In its own folder, with its own settings: nothing of this repository is on the path.
    session.chdir("examples/downstream_alignment")
    session.run("pytest", "-c", "pyproject.toml", *session.posargs)


@nox.session
@removing_environment
def integrations(session: nox.Session) -> None:
    """Train with Accelerate, Transformers, Lightning, DCP, torchtitan, torchao: native, swapped."""
    install(session, group("integrations"), TORCH_DISTRIBUTIONS)
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    # Each in a process of its own: trainers change torch's classes when they are imported.
    session.run("pytest", "examples/trainers/tests")
    session.run("pytest", "examples/torchtitan/tests")
    session.run("pytest", "examples/torchao/tests")
    run_blocks(session, "torchtitan", TORCHTITAN_PAGES)


@nox.session(default=False)
@removing_environment
def torchtitan_matrix(session: nox.Session) -> None:
    """Train torchtitan in every parallelism, on the torch it is made for: 6 GB, ten minutes."""
    # Not the pinned torch: torchtitan 0.3 needs 2.14 for tensor parallelism and pipelines.
    folders = [distribution.folder for distribution in TORCH_DISTRIBUTIONS]
    session.install("torch==2.14.1", *group("torchtitan"), *folders)
    session.run("python", "examples/torchtitan/tests/matrix.py", *session.posargs)


@nox.session
@removing_environment
def docs(session: nox.Session) -> None:
    """Build the site into build/docs, check that it is complete, and run the code of its pages."""
    install(session, group("docs"), TORCH_DISTRIBUTIONS)
    site = ROOT / "build" / "docs"
    shutil.rmtree(site, ignore_errors=True)
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", str(site))
    session.run("pytest", "docs/checks", env={"PYTHONPATH": str(ROOT / "docs" / "checks")})
    pages = [
        *map(str, Path("docs").glob("*.md")),
        *map(str, Path("docs/migrating").glob("*.md")),
        *("README.md", "CONTRIBUTING.md"),
        *(f"{each.folder}/README.md" for each in TORCH_DISTRIBUTIONS),
    ]
    elsewhere = {*MINDSPORE_PAGES, *TORCHTITAN_PAGES}
    run_blocks(session, "torch", sorted(set(pages) - elsewhere))


@nox.session
@removing_environment
def lint(session: nox.Session) -> None:
    """Check style and formatting of the whole repository."""
    install(session, group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
@removing_environment
def typecheck(session: nox.Session) -> None:
    """Check the types of packages, examples, benchmarks and this file."""
    install(session, group("typecheck"))
    session.run("mypy", *session.posargs)


@nox.session
@removing_environment
def build(session: nox.Session) -> None:
    """Build every distribution, twice to the same bytes, and import its wheel by itself."""
    session.install("build", *group("tools"), *group_of_build())
    session.run("pytest", "tools/tests")
    shutil.rmtree(BUILT, ignore_errors=True)
    again = Path(session.create_tmp()) / "again"
    shutil.rmtree(again, ignore_errors=True)
    again.mkdir()
    shutil.copy(".gitignore", again)  # which source distributions hold
    # Times in archives: the commit's, or whatever the environment says already.
    committed = session.run("git", "log", "-1", "--format=%ct", external=True, silent=True)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or str(committed).strip()
    for distribution in DISTRIBUTIONS:
        build_one(session, Path(distribution.folder), BUILT, epoch)
        # Elsewhere, with other times of files, and by another user, whose files others may write.
        copy = again / distribution.name
        shutil.copytree(distribution.folder, copy, copy_function=shutil.copy)
        for file in copy.rglob("*"):
            file.chmod(file.stat().st_mode | 0o020)
        build_one(session, copy, again / "dist", epoch)
    for file in sorted(BUILT.iterdir()):
        if file.read_bytes() != (again / "dist" / file.name).read_bytes():
            session.error(f"{file.name} is different each time it is built")
    for distribution in DISTRIBUTIONS:
        (wheel,) = BUILT.glob(f"{distribution.module}-*.whl")
        check_contents(session, distribution, wheel)
        check_import(session, distribution, wheel)


def group_of_build() -> tuple[str, ...]:
    """What the distributions say that they need to be built."""
    projects = [nox.project.load_toml(f"{each.folder}/pyproject.toml") for each in DISTRIBUTIONS]
    return tuple({line for project in projects for line in project["build-system"]["requires"]})


def build_one(session: nox.Session, folder: Path, target: Path, epoch: str) -> None:
    """Build the sdist of a distribution, and the wheel from it; ``epoch`` in seconds."""
    session.run(
        *("python", "-m", "build", "--no-isolation", "--outdir", str(target), str(folder)),
        env={"SOURCE_DATE_EPOCH": epoch},
    )


def check_contents(session: nox.Session, distribution: Distribution, wheel: Path) -> None:
    """Fail unless the wheel holds all of the module and its licence, and no tests."""
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    metadata = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    source = ROOT / distribution.folder / "src"
    needed = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    missing = (needed | {f"{metadata}/licenses/LICENSE"}) - files
    if missing:
        session.error(f"{wheel.name} lacks {sorted(missing)}")
    allowed = (f"{distribution.module}/", f"{metadata}/")
    stray = [name for name in files if not name.startswith(allowed) or "/tests/" in name]
    if stray:
        session.error(f"{wheel.name} holds {sorted(stray)}")


def check_import(session: nox.Session, distribution: Distribution, wheel: Path) -> None:
    """Install the wheel in a fresh environment, alone and with its extras, and import it."""
    environment = Path(session.create_tmp()) / distribution.name
    session.run("python", "-m", "venv", "--clear", str(environment))
    python = str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")
    pip = (python, "-m", "pip", "install", "-q", *PINNED)
    check = (python, "-c", CHECK_IMPORT, distribution.module, distribution.name)
    for extras in ("", *(f"[{extra}]" for extra in distribution.portable_extras)):
        session.run(*pip, "--find-links", str(BUILT), f"{wheel}{extras}", external=True)
        session.log(f"import {distribution.module}")
        session.run(*check, *distribution.never_loads, external=True, log=False)
    shutil.rmtree(environment)


@nox.session(default=False)
@removing_environment
def release(session: nox.Session) -> None:
    """Give one distribution its next version: nox -s release -- swap-torch 0.2.0."""
    session.install(*group("tools"))
    session.run("python", "tools/release.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def minimum(session: nox.Session) -> None:
    """Test with the oldest torch and the oldest MindSpore that the distributions accept."""
    for name in ("swap-torch", "swap-mindspore", "swap-mindformers"):
        session.notify(f"minimum-{name}")


def oldest(framework: str, name: str) -> str:
    """The oldest release of a framework that a distribution accepts, as a requirement."""
    project = nox.project.load_toml(f"packages/{name}/pyproject.toml")
    (wanted,) = [each for each in project["project"]["dependencies"] if framework in each]
    release = wanted.partition(">=")[2].partition(",")[0]
    return f"{framework}=={release}.0"


def test_with(session: nox.Session, distribution: Distribution, pin: str, *options: str) -> None:
    """Install one release of a framework, and run the tests of a distribution."""
    needed = [each.folder for each in needed_by(distribution)]
    # Without the development pin, whose torch is a CPU build: the index has CUDA builds, 7 GB.
    session.install("--no-compile", pin, *needed, *group("test", distribution.folder))
    run_tests(session, distribution, *options)


@nox.session(default=False)
@removing_environment
def tests_with(session: nox.Session) -> None:
    """Test one distribution with another release: nox -s tests_with -- swap-torch torch==2.12.0."""
    known = {each.name: each for each in DISTRIBUTIONS}
    if len(session.posargs) < 2 or session.posargs[0] not in known:
        session.error(
            f"tests_with got {session.posargs}; give one of {', '.join(known)}, a requirement such "
            f"as torch==2.12.0, and what else pytest is to be given"
        )
    name, pin, *options = session.posargs
    test_with(session, known[name], pin, *options)


def add_minimum_session(distribution: Distribution, pin: str) -> None:
    """Register the session that tests one distribution with the oldest framework."""

    def run(session: nox.Session) -> None:
        test_with(session, distribution, pin, *session.posargs)

    run.__doc__ = f"Test {distribution.name} with {pin}, the oldest that it accepts."
    register = nox.session(name=f"minimum-{distribution.name}", default=False)
    register(removing_environment(run))


for each in DISTRIBUTIONS:
    if each.name == "swap-torch":
        add_minimum_session(each, oldest("torch", each.name))
    elif each.name in NEEDS_MINDSPORE:
        add_minimum_session(each, oldest("mindspore", "swap-mindspore"))


@nox.session
@removing_environment
def demo(session: nox.Session) -> None:
    """Train a small GPT natively and swapped, and compare."""
    install(session, group("demo"), TORCH_DISTRIBUTIONS)
    session.run("python", "examples/train_gpt.py", *session.posargs)


@nox.session
@removing_environment
def demo_mindspore(session: nox.Session) -> None:
    """Train a small language model with MindSpore natively and swapped, and compare."""
    install(session, (), MINDSPORE_DISTRIBUTIONS)
    session.run("python", "examples/train_mindspore.py", *session.posargs, env=MINDSPORE_QUIET)


@nox.session
@removing_environment
def demo_mindformers(session: nox.Session) -> None:
    """Train a small language model with MindFormers' AdamW natively and swapped, and compare."""
    install(session, (), MINDSPORE_DISTRIBUTIONS)
    install_mindformers(session)
    session.run("python", "examples/train_mindformers.py", *session.posargs, env=MINDSPORE_QUIET)


@nox.session
@removing_environment
def bench(session: nox.Session) -> None:
    """Run the benchmarks: all, or those named after --; JSON goes to build/bench."""
    install(session, group("bench"), TORCH_DISTRIBUTIONS)
    names = session.posargs or ("all",)
    session.run("python", "benchmarks/run.py", *names, "--out", "build/bench")


@nox.session(venv_backend="none", default=False)
def device_check(session: nox.Session) -> None:
    """Check and measure the accelerator of this machine, with its own torch; 8 minutes."""
    out = ("--out", "build/device_check")
    session.run("bash", "benchmarks/device_check.sh", *out, *session.posargs, external=True)


def rehearse_device_check(session: nox.Session) -> None:
    """Run it on the simulated accelerator, in the environment of the session."""
    session.run(
        *("bash", "benchmarks/device_check.sh", "--device", "sim", "--out", "build/rehearsal"),
        external=True,
    )
