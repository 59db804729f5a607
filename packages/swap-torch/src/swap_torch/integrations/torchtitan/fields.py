# SPDX-License-Identifier: Apache-2.0
"""The fields that swapping adds to the config of an optimizers container."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from swap_core import SwapOptimizerConfig

__all__ = ["PREFIX", "SwapFields"]

PREFIX = "swap_optimizer_"
"""Begins the name of each field but the switch itself."""

_RENAMED = {"times": "swap_times"}
"""Fields whose name is not that of :class:`SwapOptimizerConfig` with the prefix before it."""


# No slots: a container's config has slots of its own, and Python combines one such base only. The
# texts below are what torchtitan's --help shows.
@dataclass(kw_only=True)
class SwapFields:
    """Mixed into ``Config`` of a container by :func:`.container.swap_container`."""

    swap_optimizer: bool = False
    """Keep optimizer states in pinned host memory between updates; the same bits, less memory."""

    swap_optimizer_times: int = 16
    """Number of batches in which one optimizer's states pass through the device in an update.
    More batches: lower peak, more copies."""

    swap_optimizer_state_keys: list[str] | None = None
    """Names of the states that swap, such as exp_avg,exp_avg_sq. None: all."""

    swap_optimizer_min_numel: int = 1024
    """A state with fewer elements (of its local shard) stays on the device."""

    swap_optimizer_packed_swap: bool | None = None
    """True: contiguous copies through staging arenas. False: state by state. None: the optimizer's
    default."""

    swap_optimizer_staging_buffers: int = 2
    """Number of device arenas of the packed pipeline."""

    swap_optimizer_zigzag: bool = False
    """Every other update runs backwards, so that the last batch of one is the first of the next."""

    swap_optimizer_device_budget: int | float = 0
    """States that stay on the device for each optimizer: bytes (an integer), or a fraction of those
    that would swap (0.0 to 1.0)."""

    swap_optimizer_offload: Literal["always", "auto"] = "always"
    """auto: swap all in the first updates, then only as much as turned out not to fit."""

    def swap_options(self) -> SwapOptimizerConfig:
        """These fields as the config that optimizers are wrapped with.

        Raises:
            ValueError: a value is not accepted; names the field.
        """
        options = {
            field.name: getattr(self, field.name)
            for field in fields(SwapFields)
            if field.name.startswith(PREFIX)
        }
        for name, value in options.items():
            _options({name: value}, f"optimizer.{name}")
        return _options(options, "optimizer.swap_optimizer")


def _options(values: dict[str, Any], where: str) -> SwapOptimizerConfig:
    """Leave out the prefix, and name the field in what is raised."""
    short = {name.removeprefix(PREFIX): value for name, value in values.items()}
    try:
        return SwapOptimizerConfig(
            **{_RENAMED.get(name, name): value for name, value in short.items()}
        )
    except ValueError as error:
        raise ValueError(f"{where}: {_with_field_names(str(error))}") from error


def _with_field_names(message: str) -> str:
    """Call options by the names of the fields here."""
    for field in fields(SwapFields):
        name = field.name.removeprefix(PREFIX)
        message = re.sub(rf"\b{_RENAMED.get(name, name)}=", f"{field.name}=", message)
    return message
