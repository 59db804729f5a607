# SPDX-License-Identifier: Apache-2.0
"""Pictures, which need matplotlib and nothing else here does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["need_matplotlib", "new_figure"]


def need_matplotlib() -> None:
    """Check, before there is anything to draw, that it can be drawn.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib, which is not installed: pip install 'matplotlib>=3.8'"
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """Make an empty picture, of this many inches.

    Raises:
        ImportError: as :func:`need_matplotlib`.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
