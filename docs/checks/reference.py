# SPDX-License-Identifier: Apache-2.0
"""The pages that are made and not written: the reference of each public module, the changelogs.

A module is public if its ``__init__.py`` has an ``__all__``, and what is listed there is its
reference. So a new name, module or distribution is documented without touching the site.
"""

from __future__ import annotations

import ast
import inspect
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import indent

__all__ = ["ROOT", "PublicModule", "public_modules", "write_pages"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class PublicModule:
    """A module that users import from, known without importing it."""

    name: str
    names: tuple[str, ...]
    """Its ``__all__``."""
    shared: dict[str, str]
    """Of these, the ones that another distribution documents, and that module."""


def public_modules() -> dict[str, PublicModule]:
    """All of them, by name."""
    found = {}
    for source in sorted(ROOT.glob("packages/*/src")):
        for file in sorted(source.rglob("__init__.py")):
            tree = ast.parse(file.read_text("utf-8"))
            name = ".".join(file.parent.relative_to(source).parts)
            if names := _assigned_all(tree):
                found[name] = PublicModule(name, names, _shared(tree, name, names))
    return found


def _assigned_all(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()


def _shared(tree: ast.Module, name: str, names: tuple[str, ...]) -> dict[str, str]:
    package = name.partition(".")[0]
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if alias.name in names and str(node.module).partition(".")[0] != package
    }


def write_pages(docs: Path) -> None:
    """Write ``api/`` and ``changelog/`` anew; git ignores both."""
    pages = {f"api/{m.name}.rst": "\n".join(_reference(m)) for m in public_modules().values()}
    pages |= {
        f"changelog/{file.parent.name}.md": f"```{{include}} ../../{file.relative_to(ROOT)}\n```\n"
        for file in sorted(ROOT.glob("packages/*/CHANGELOG.md"))
    }
    pages["api/index.md"] = _index("API", "Every public name, by the module to import it from.")
    pages["changelog/index.md"] = _index("Changelog", "Distributions are versioned separately.")
    for folder in ("api", "changelog"):
        shutil.rmtree(docs / folder, ignore_errors=True)
        (docs / folder).mkdir()
    for name, text in pages.items():
        (docs / name).write_text(text, "utf-8")


def _reference(module: PublicModule) -> Iterator[str]:
    """A page in reStructuredText, which autodoc's directives are for.

    Constants are written out, because autodoc looks for their words where they are re-exported.
    """
    constants = {name: _constant(module.name, name) for name in module.names}
    own = [name for name, words in constants.items() if words is None]
    yield from (module.name, "=" * len(module.name), "", f".. automodule:: {module.name}")
    yield f"   :members: {', '.join(name for name in own if name not in module.shared)}"
    for option in ("imported-members", "undoc-members", "show-inheritance"):
        yield f"   :{option}:"
    for name, words in constants.items():
        if name in module.shared:
            words = f"The same as :py:obj:`{module.shared[name]}.{name}`."
        if words is not None:
            yield from ("", f".. py:data:: {name}", "", indent(words, "   "))
    yield ""


def _index(title: str, about: str) -> str:
    return f"# {title}\n\n{about}\n\n```{{toctree}}\n:glob:\n:maxdepth: 1\n*\n```\n"


def _constant(module: str, name: str) -> str | None:
    """The string after the assignment of ``name``; None if it is a class or a function.

    ``__version__`` is assigned in a file of its own, and has that file's docstring.
    """
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _constant(str(node.module), name)
    if name == "__version__":
        return ast.get_docstring(tree) or ""
    for node, after in pairwise([*tree.body, ast.Pass()]):
        if name in _targets(node):
            text = after.value if isinstance(after, ast.Expr) else None
            return inspect.cleandoc(ast.literal_eval(text)) if text else ""
    return None


def _tree(module: str) -> ast.Module:
    path = module.replace(".", "/")
    patterns = (f"packages/*/src/{path}.py", f"packages/*/src/{path}/__init__.py")
    found = [file for pattern in patterns for file in ROOT.glob(pattern)]
    return ast.parse(found[0].read_text("utf-8"))


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []
