# SPDX-License-Identifier: Apache-2.0
"""What an optimizer must tell so that its update can run batch by batch, and how it is found.

The life of one update::

    prepare_step()  ->  iter_update_units(step)  ->  partition, load ...
                        step_batch(step, call)   for each batch, between load and store
                        finish_step(step)

``iter_update_units`` is asked only when the plan of an earlier step does not fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from swap_core.config import SwapOptimizerConfig
from swap_core.errors import UnsupportedOptimizerError
from swap_core.unit import UpdateUnit

__all__ = ["ADAPTER_GROUP", "OptimizerSwapAdapter", "find_adapter"]

ADAPTER_GROUP = "swap_core.adapters"
"""Entry-point group. Names are ``<framework>.<optimizer>``, such as ``torch.adamw``; values are
subclasses of :class:`OptimizerSwapAdapter` that are made with the optimizer as only argument."""

ParamT = TypeVar("ParamT")
StepT = TypeVar("StepT")
CallT = TypeVar("CallT")


class OptimizerSwapAdapter(ABC, Generic[ParamT, StepT, CallT]):
    """One kind of optimizer. ``StepT`` is what one step needs, ``CallT`` one batched update."""

    @classmethod
    @abstractmethod
    def matches(cls, optimizer: object) -> bool:
        """Tell whether this adapter is the one for ``optimizer``. Must not raise."""

    @classmethod
    @abstractmethod
    def supports(cls) -> str:
        """Name the optimizer in the words of messages, such as ``torch.optim.AdamW``."""

    @abstractmethod
    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse options that cannot be combined with swapping, before anything changes.

        Raises:
            ValueError: naming the option, where it was found, and what to use instead.
        """

    @abstractmethod
    def prepare_step(self) -> StepT:
        """Collect the gradients of this step. Refuses what native refuses, changes nothing."""

    @abstractmethod
    def iter_update_units(self, step: StepT) -> Iterable[UpdateUnit[ParamT]]:
        """Give the units that have a gradient in this step, in parameter order."""

    @abstractmethod
    def step_batch(self, step: StepT, call: CallT) -> None:
        """Queue the update of one batch (or a part of it) on the current stream."""

    @abstractmethod
    def finish_step(self, step: StepT) -> None:
        """Do what natively happens once, after all parameters."""


def find_adapter(
    optimizer: object, framework: str
) -> type[OptimizerSwapAdapter[object, object, object]]:
    """Find the adapter class for ``optimizer`` among the installed ones of ``framework``.

    Only adapters of ``framework`` are imported, so that no other framework is.

    Raises:
        UnsupportedOptimizerError: no adapter matches; the message lists what is supported.
        ImportError: an adapter that is installed cannot be imported.
        ValueError: two installed adapters have the same name.
    """
    adapters = [_load(entry) for entry in _entries(framework)]
    for adapter in adapters:
        if adapter.matches(optimizer):
            return adapter
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    supported = ", ".join(adapter.supports() for adapter in adapters) or "nothing (none installed)"
    raise UnsupportedOptimizerError(
        f"swap_optimizer: optimizer is a {kind}, which is not supported. Supported: {supported}. "
        f"A subclass that changes step() needs an adapter of its own (entry-point group "
        f"{ADAPTER_GROUP!r})."
    )


def _entries(framework: str) -> list[EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ADAPTER_GROUP):
        if not entry.name.startswith(f"{framework}."):
            continue
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ValueError(
                f"Two installed distributions register the adapter {entry.name!r} in "
                f"{ADAPTER_GROUP!r}: {other.value!r} and {entry.value!r}. Uninstall one."
            )
    return [found[name] for name in sorted(found)]


def _load(entry: EntryPoint) -> type[OptimizerSwapAdapter[object, object, object]]:
    try:
        adapter: type[OptimizerSwapAdapter[object, object, object]] = entry.load()
    except Exception as error:
        distribution = entry.dist.name if entry.dist is not None else "an unknown distribution"
        raise ImportError(
            f"The adapter {entry.name!r} ({entry.value}) that {distribution} registers in "
            f"{ADAPTER_GROUP!r} cannot be imported. Repair or uninstall {distribution}."
        ) from error
    return adapter
