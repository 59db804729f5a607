# SPDX-License-Identifier: Apache-2.0
"""The implementation of updates: two flags, which a config gives to all optimizers by one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swap_core import UnsupportedOptionError
from swap_torch.adapter import TorchSwapAdapter

__all__ = ["FLAGS", "NAMES", "is_at_fault", "refuses", "what_is_on"]

FLAGS = ("fused", "foreach")
"""Options of a param group. At most one is on; none is the for-loop."""

NAMES = ("fused", "foreach", "for-loop")
"""What torchtitan calls them, of those that swapping may support."""


def refuses(adapter: TorchSwapAdapter, group: Mapping[str, Any]) -> bool:
    """Tell whether a param group with these options cannot swap."""
    try:
        adapter.validate_group(group, "a param group")
    except UnsupportedOptionError:
        return True
    return False


def is_at_fault(adapter: TorchSwapAdapter, group: Mapping[str, Any]) -> bool:
    """Tell whether these options cannot swap, but could as a for-loop."""
    return refuses(adapter, group) and not refuses(
        adapter, {**group, **dict.fromkeys(FLAGS, False)}
    )


def what_is_on(group: Mapping[str, Any]) -> str:
    """The flags in the words of messages, such as ``foreach=True``."""
    return " and ".join(f"{flag}=True" for flag in FLAGS if group.get(flag))
