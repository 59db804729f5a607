# SPDX-License-Identifier: Apache-2.0
"""The one place where a user says how to swap."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from swap_core.errors import UnsupportedOptionError

__all__ = ["SCHEDULES", "SwapOptimizerConfig", "refuse_schedules"]

SCHEDULES = ("prefetch", "zigzag", "overlap_backward", "device_budget", "offload")
"""Fields that decide when, and whether, states move; torch optimizers only."""


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

    prefetch: Literal["step", "backward"] = "step"
    """torch: when the first loads begin. ``"step"``: in ``step()``. ``"backward"``: when the
    backward pass comes to the parameters of the first batch; arenas are held from then on."""

    zigzag: bool = False
    """torch, packed: every other update runs backwards, and the last batch of an update stays in
    its arena, where the next one begins: a load and a store less, an arena held between updates."""

    overlap_backward: bool | Literal["trusted"] = False
    """torch: True updates a batch in the backward pass, as soon as its gradients are final, so that
    the update hides behind it. Refused, at the first update, if gradients change between backward
    pass and ``step()`` (clipping, GradScaler, accumulation, DDP). ``"trusted"``: only told once;
    such changes are known not to matter."""

    device_budget: int | float = 0
    """torch: states of the first parameters stay on the device, up to this many bytes (integer) or
    this fraction of the states that swap (float, 0.0 to 1.0). Each rank may have its own."""

    offload: Literal["always", "auto"] = "always"
    """torch: ``"auto"`` swaps in the first updates, sees how much device memory was never used, and
    then lets as many states stay on the device as fit there; the report says why."""

    def __post_init__(self) -> None:
        """Check every field and make ``state_keys`` a tuple."""
        _check_integer("swap_times", self.swap_times, minimum=1)
        _check_integer("min_numel", self.min_numel, minimum=0)
        _check_integer("staging_buffers", self.staging_buffers, minimum=2)
        _check_bool("include_master_params", self.include_master_params)
        _check_bool("allow_closure", self.allow_closure)
        _check_choice("prefetch", self.prefetch, ("step", "backward"))
        _check_bool("zigzag", self.zigzag)
        if self.overlap_backward != "trusted":
            _check_bool("overlap_backward", self.overlap_backward, also="'trusted'")
        _check_choice("offload", self.offload, ("always", "auto"))
        _check_budget(self.device_budget)
        self._check_together()
        if self.packed_swap is not None:
            _check_bool("packed_swap", self.packed_swap, also="None")
        if self.state_keys is not None:
            object.__setattr__(self, "state_keys", _checked_keys(self.state_keys))

    def _check_together(self) -> None:
        """Refuse fields that exclude each other."""
        if self.overlap_backward and self.prefetch != "step":
            raise _refuse("prefetch", self.prefetch, "'step': overlap_backward loads ahead anyway")
        if self.overlap_backward and self.zigzag:
            raise _refuse("zigzag", True, "False: overlap_backward always runs backwards")
        if self.offload == "auto" and self.device_budget:
            raise _refuse("device_budget", self.device_budget, "0: offload='auto' finds it")
        if self.zigzag and self.packed_swap is False:
            raise _refuse("zigzag", True, "False: with packed_swap=False there is no arena")


def refuse_schedules(config: SwapOptimizerConfig, optimizer: str) -> None:
    """Refuse the fields that only torch optimizers have, for a binding without them.

    Args:
        config: As the user gave it.
        optimizer: In the words of messages.

    Raises:
        UnsupportedOptionError: one of them is not at its default.
    """
    defaults = SwapOptimizerConfig()
    for field in SCHEDULES:
        value, default = getattr(config, field), getattr(defaults, field)
        if value != default:
            raise UnsupportedOptionError(
                f"swap_optimizer: {field}={value!r} is for torch optimizers; {optimizer} does not "
                f"have it. Leave it {default!r}."
            )


def _refuse(field: str, value: object, accepted: str) -> ValueError:
    return ValueError(f"SwapOptimizerConfig: {field}={value!r} is not accepted; give {accepted}.")


def _check_integer(field: str, value: object, *, minimum: int) -> None:
    # bool is an int in Python, and swap_times=True is always a slip.
    if type(value) is not int or value < minimum:
        raise _refuse(field, value, f"an integer >= {minimum}")


def _check_bool(field: str, value: object, *, also: str = "") -> None:
    if type(value) is not bool:
        raise _refuse(field, value, "True or False" + (f" or {also}" if also else ""))


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _refuse(field, value, " or ".join(map(repr, choices)))


def _check_budget(value: object) -> None:
    fits = (type(value) is int and value >= 0) or (type(value) is float and 0.0 <= value <= 1.0)
    if not fits:
        raise _refuse("device_budget", value, "bytes (an integer >= 0) or a fraction (0.0 to 1.0)")


def _checked_keys(keys: object) -> tuple[str, ...]:
    accepted = 'a collection of distinct state names such as ("exp_avg", "exp_avg_sq"), or None'
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise _refuse("state_keys", keys, accepted)
    names = tuple(keys)
    if not names or any(type(name) is not str for name in names) or len(set(names)) != len(names):
        raise _refuse("state_keys", keys, accepted)
    return names
