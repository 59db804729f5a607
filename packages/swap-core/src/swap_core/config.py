# SPDX-License-Identifier: Apache-2.0
"""The one place where a user says how to swap."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["SwapOptimizerConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapOptimizerConfig:
    """How optimizer states swap. Immutable; checked when it is made.

    Raises:
        ValueError: a field has a value that is not accepted; the message names the field, the
            value, and what is accepted.
    """

    swap_times: int = 16
    """Target number of batches per update, > 0. More batches: lower peak, more copies."""

    state_keys: Collection[str] | None = None
    """Names of the states that swap, such as ``("exp_avg", "exp_avg_sq")``. None: all eligible."""

    min_numel: int = 1024
    """A state with fewer elements (of its local shard) stays on the device; >= 0."""

    include_master_params: bool = False
    """Also swap fp32 master parameters that the optimizer owns (MindFormers AdamW only)."""

    packed_swap: bool | None = None
    """True: contiguous copies through staging arenas; False: state by state. None: the
    optimizer's default."""

    staging_buffers: int = 2
    """Device arenas of the packed pipeline, >= 2. The peak is this many of the largest batch."""

    allow_closure: bool = False
    """torch: accept ``step(closure)``, evaluated once, before the first batch."""

    def __post_init__(self) -> None:
        """Check every field and make ``state_keys`` a tuple."""
        _check_integer("swap_times", self.swap_times, minimum=1)
        _check_integer("min_numel", self.min_numel, minimum=0)
        _check_integer("staging_buffers", self.staging_buffers, minimum=2)
        _check_bool("include_master_params", self.include_master_params)
        _check_bool("allow_closure", self.allow_closure)
        if self.packed_swap is not None:
            _check_bool("packed_swap", self.packed_swap, also="None")
        if self.state_keys is not None:
            object.__setattr__(self, "state_keys", _checked_keys(self.state_keys))


def _refuse(field: str, value: object, accepted: str) -> ValueError:
    return ValueError(f"SwapOptimizerConfig: {field}={value!r} is not accepted; give {accepted}.")


def _check_integer(field: str, value: object, *, minimum: int) -> None:
    # bool is an int in Python, and swap_times=True is always a slip.
    if type(value) is not int or value < minimum:
        raise _refuse(field, value, f"an integer >= {minimum}")


def _check_bool(field: str, value: object, *, also: str = "") -> None:
    if type(value) is not bool:
        raise _refuse(field, value, "True or False" + (f" or {also}" if also else ""))


def _checked_keys(keys: object) -> tuple[str, ...]:
    accepted = 'a collection of distinct state names such as ("exp_avg", "exp_avg_sq"), or None'
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise _refuse("state_keys", keys, accepted)
    names = tuple(keys)
    if not names or any(type(name) is not str for name in names) or len(set(names)) != len(names):
        raise _refuse("state_keys", keys, accepted)
    return names
