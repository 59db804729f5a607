# SPDX-License-Identifier: Apache-2.0
"""From an optimizer config to the same with the fields of swapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive

from swap_torch.integrations.torchtitan.container import swap_container
from swap_torch.integrations.torchtitan.fields import PREFIX, SwapFields

__all__ = ["option_names", "swap_config"]

_FIELDS = tuple(field.name for field in fields(SwapFields))


def swap_config(
    config: OptimizersContainer.Config,
    **options: Any,  # noqa: ANN401  # values of any of the fields
) -> OptimizersContainer.Config:
    """Give ``config`` the fields of swapping, and with them their command line flags.

    Args:
        config: Of torchtitan's optimizers container, or of a third party's.
        options: Fields to set, such as ``swap_optimizer=True``; flags overrule them.

    Returns:
        A new config of :func:`swap_container` of the container that ``config`` builds.

    Raises:
        ValueError: an option that does not exist or has a value that is not accepted, or, if
            swapping is on, a config or container that cannot be combined with it.
        TypeError: not the config of an optimizers container.

    Example:
        >>> config = llama3_debugmodel()
        >>> config.optimizer = swap_config(config.optimizer, swap_optimizer=True)
    """
    if not isinstance(config, OptimizersContainer.Config):
        raise TypeError(
            f"swap_config: {type(config).__qualname__} is not the config of an optimizers "
            f"container; give that of a trainer: swap_config(config.optimizer)."
        )
    for name in options:
        if name not in _FIELDS:
            raise ValueError(
                f"swap_config: {name!r} is not accepted; give some of {', '.join(_FIELDS)}."
            )
    if isinstance(config, SwapFields):
        # By name they are checked above, by value when the new config is made.
        return replace(config, **options)
    return derive(config, swap_container(config._owner).Config, **options)


def option_names(options: Mapping[str, object]) -> dict[str, object]:
    """Put the prefix before each of ``options``.

    Raises:
        ValueError: one does not exist.
    """
    short = [name.removeprefix(PREFIX) for name in _FIELDS if name.startswith(PREFIX)]
    for name in options:
        if name not in short:
            raise ValueError(
                f"swap_optimizer: the override's option {name!r} is not accepted; give some of "
                f"{', '.join(short)}."
            )
    return {f"{PREFIX}{name}": value for name, value in options.items()}
