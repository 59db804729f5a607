# SPDX-License-Identifier: Apache-2.0
"""Containers of optimizers that swap what they build."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from swap_core import SwapOptimizerConfig
from swap_torch.api import swap_optimizer
from swap_torch.device import AnyTorchDevice
from swap_torch.integrations.torchtitan.checkpoint import with_own_implementation
from swap_torch.integrations.torchtitan.conflicts import (
    refuse_config,
    refuse_container,
    refuse_optimizers,
)
from swap_torch.integrations.torchtitan.fields import SwapFields
from swap_torch.integrations.torchtitan.rehearsal import rehearse, stand_ins
from swap_torch.integrations.torchtitan.shares import refuse_options, share_of

__all__ = ["SwapOptimizersContainer", "swap_container"]


class SwapMixin:
    """What swapping adds to a container.

    Optimizers are wrapped where they are built, so whatever gets them later (learning rate
    schedulers, hooks, the checkpointer) sees the wrapped ones. ``step``, ``state_dict`` and the
    rest of the container are left alone.
    """

    optimizers: list[Optimizer]

    def __init__(self, config: OptimizersContainer.Config, **runtime: object) -> None:
        super().__init__(config, **runtime)  # type: ignore[call-arg]  # the container's
        if config.swap_optimizer:
            self._swap(config)

    def swap_device(self) -> AnyTorchDevice | None:
        """The device that :func:`swap_torch.swap_optimizer` is given; None: the parameters' own.

        For subclasses, such as tests on machines without an accelerator.
        """
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, whose implementation of updates may be one that cannot swap.

        Raises:
            StateDictError: another option in it cannot be combined with swapping. Nothing was
                changed.
        """
        loadable = with_own_implementation(self.optimizers, state_dict)
        super().load_state_dict(loadable)  # type: ignore[misc]  # the container's

    def _swap(self, config: OptimizersContainer.Config) -> None:
        device, options = self.swap_device(), config.swap_options()
        refuse_optimizers(self.optimizers, device)
        refuse_options(options, [*self.optimizers, *stand_ins(config)])
        for optimizer in self.optimizers:
            _swap_share(optimizer, options, device)


def _swap_share(
    optimizer: Optimizer, options: SwapOptimizerConfig, device: AnyTorchDevice | None
) -> None:
    """Wrap an optimizer with those of the options that it can take, and log which it cannot."""
    kind = type(optimizer).__name__
    share = share_of(options, optimizer)
    if share is None:
        logger.info(
            f"optimizer.swap_optimizer: {kind} does not swap: swap_optimizer_state_keys names none "
            f"of its states."
        )
        return
    if share.zigzag != options.zigzag:
        logger.info(
            f"optimizer.swap_optimizer: {kind} runs every update forwards, in spite of "
            f"swap_optimizer_zigzag: its updates may not change their order."
        )
    swap_optimizer(optimizer, share, device=device)
    logger.info(f"optimizer.swap_optimizer: {optimizer!r}")


def swap_container(base: type[OptimizersContainer]) -> type[OptimizersContainer]:
    """Make a container that is ``base`` with swapping: the same config, and the fields of ours.

    For third parties' containers; torchtitan's own is :class:`SwapOptimizersContainer`. Called
    again it returns the same class.

    Args:
        base: Takes its config first and everything else by keyword, and keeps what it builds in
            ``optimizers``, as torchtitan's does. Its ``step`` must call theirs.

    Returns:
        The container. Its config refuses what cannot be combined with swapping, if that is on.
    """
    if issubclass(base, SwapMixin):
        return base
    if base not in _made:
        _made[base] = _make(base)
    return _made[base]


_made: dict[type[OptimizersContainer], type[OptimizersContainer]] = {}
"""What :func:`swap_container` returned, so that configs of one base are of one class."""


def _make(base: type[OptimizersContainer]) -> type[OptimizersContainer]:
    @dataclass(kw_only=True, slots=True)
    class Config(SwapFields, base.Config):  # type: ignore[name-defined]  # of an argument
        def __post_init__(self) -> None:
            _post_init_of(base.Config)(self)
            options = self.swap_options()
            if self.swap_optimizer:
                refuse_container(base)
                refuse_config(self)
                rehearse(self, options)

    name = f"Swap{base.__name__}"
    Config.__qualname__ = f"{name}.Config"
    # By its base: it has no name that can be imported.
    copyreg.pickle(Config, partial(_reduced, base))
    about = f"{base.__name__} that keeps optimizer states in host memory if its config says so."
    return type(
        name, (SwapMixin, base), {"Config": Config, "__doc__": about, "__module__": __name__}
    )


def _reduced(
    base: type[OptimizersContainer], config: OptimizersContainer.Config
) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """How to copy or unpickle a config: which class to make, and what to fill it with."""
    return _blank, (base,), object.__reduce_ex__(config, 2)[2]


def _blank(base: type[OptimizersContainer]) -> OptimizersContainer.Config:
    kind = swap_container(base).Config
    return kind.__new__(kind)


def _post_init_of(config: type) -> Callable[[object], None]:
    """``__post_init__``, which a dataclass may have or not."""
    found: Callable[[object], None] = getattr(config, "__post_init__", lambda _: None)
    return found


SwapOptimizersContainer = swap_container(OptimizersContainer)
"""torchtitan's container, with swapping."""
