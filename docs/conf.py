# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation site: ``nox -s docs`` builds it into build/docs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "checks"))
# The checkout, whatever is installed; and what needs a framework that is not.
sys.path[:0] = map(str, HERE.parent.glob("packages/*/src"))

from reference import write_pages  # noqa: E402  # found by the line above
from sphinx.application import Sphinx  # noqa: E402

project = "swap"
author = "the authors of swap"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["checks"]

html_theme = "furo"
html_title = "swap"
html_static_path: list[str] = []

# Anchors for [text](page.md#heading), as GitHub makes them.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# What the site's own environment does not hold; pages about it are read without running it.
autodoc_mock_imports = ["mindspore", "mindformers", "torch_npu"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _stand_in_for_torchtitan() -> None:
    """Put classes where ``swap_torch.integrations.torchtitan`` derives from: mocks are none."""

    @dataclass
    class Config:
        """Of a container."""

    container = type("OptimizersContainer", (), {"Config": Config})
    names: dict[str, dict[str, object]] = {
        "torchtitan": {},
        "torchtitan.components": {},
        "torchtitan.components.optimizer": {
            "OptimizersContainer": container,
            "ParamGroupConfig": type("ParamGroupConfig", (), {}),
        },
        "torchtitan.config": {"Configurable": type("Configurable", (), {})},
        "torchtitan.config.override": {
            "derive": None,
            "override": lambda **options: lambda function: function,
        },
        "torchtitan.tools": {},
        "torchtitan.tools.logging": {"logger": None},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


_stand_in_for_torchtitan()


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for pages."""
    write_pages(HERE)
