# SPDX-License-Identifier: Apache-2.0
"""The fields that swapping adds to the config of an optimizers container."""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    def swap_options(self) -> SwapOptimizerConfig:
        """These fields as the config that optimizers are wrapped with.

        Raises:
            ValueError: a value is not accepted; names the field.
        """
        options = {}
        for field in fields(SwapFields):
            if not field.name.startswith(PREFIX):
                continue
            name = field.name.removeprefix(PREFIX)
            option = {_RENAMED.get(name, name): getattr(self, field.name)}
            try:
                SwapOptimizerConfig(**option)
            except ValueError as error:
                raise ValueError(f"optimizer.{field.name}: {error}") from error
            options |= option
        return SwapOptimizerConfig(**options)
