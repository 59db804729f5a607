# SPDX-License-Identifier: Apache-2.0
"""Scenarios by name, of whatever framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["select_scenarios"]

ScenarioT = TypeVar("ScenarioT")


def select_scenarios(names: Sequence[str], scenarios: Mapping[str, ScenarioT]) -> list[ScenarioT]:
    """The scenarios of these names, or all for ``all``; in their own order.

    Raises:
        ValueError: a name is unknown; the message has those that are known.
    """
    for name in names:
        if name != "all" and name not in scenarios:
            raise ValueError(
                f"scenario {name!r} is unknown; there are: all, {', '.join(scenarios)}."
            )
    return [each for name, each in scenarios.items() if "all" in names or name in names]
