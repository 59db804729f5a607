# SPDX-License-Identifier: Apache-2.0
"""Pictures, which need matplotlib and nothing else here does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure"]


def new_figure(width: float, height: float) -> Figure:
    """Make an empty picture, of this many inches.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib, which is not installed: pip install 'matplotlib>=3.8'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
