# SPDX-License-Identifier: Apache-2.0
"""The class that a wrapped optimizer gets.

[Note: in place]
Wrapping changes the class of the optimizer object to a subclass of its own class, as swap-torch
does. So ``isinstance(optimizer, nn.Adam)`` holds, a ``TrainOneStepCell`` or ``Model`` that got the
object before wrapping keeps working, attributes are the optimizer's own in both directions, and
there is no inner optimizer that could be called by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import mindspore as ms
from mindspore import Tensor, nn

from swap_core import SwapOptimizerConfig, SwapReport, UnsupportedOptionError, find_adapter
from swap_core import format_bytes as formatted
from swap_mindspore.adapter import MindSporeSwapAdapter
from swap_mindspore.device import AnyMindSporeDevice
from swap_mindspore.engine import SwapEngine
from swap_mindspore.versions import jit_forbidden_register

__all__ = ["MindSporeSwapOptimizer", "make_engine", "turn_into_swap_optimizer"]


class MindSporeSwapOptimizer(nn.Optimizer):
    """An optimizer whose states are on the host between updates.

    Never instantiated itself: :func:`swap_mindspore.swap_optimizer` combines it with the class of
    the optimizer that it is given.
    """

    _swap_base: ClassVar[type[nn.Optimizer]]
    """The class that the optimizer had before."""

    _swap: SwapEngine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as nn.Cell
        """Update the parameters, streaming states through the device batch by batch.

        Args:
            args: The gradients: one for each parameter, as value_and_grad returns them.
            kwargs: None.

        Returns:
            A tuple of True, one for each parameter, as natively.

        Raises:
            ValueError: not one gradient per parameter, None or of another shape; nothing changed.
            TypeError: a gradient that is not dense, or of a dtype that native refuses.
            RuntimeError: in graph mode, or called from code under ``@jit``.
            MemoryError: no device memory for a batch. Batches before it are updated.
        """
        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            raise RuntimeError(
                f"{self!r} was called in graph mode, which swapping does not support. Call "
                f"mindspore.set_context(mode=mindspore.PYNATIVE_MODE). Nothing was updated."
            )
        return super().__call__(*args, **kwargs)

    def construct(self, gradients: Sequence[Tensor]) -> tuple[bool, ...]:
        """Update the parameters; see :meth:`__call__`, which runs this with the Cell's hooks."""
        # A compiled Cell that calls this one compiles this very line, and not __call__.
        return self.swapped_optimizers_cannot_be_compiled(gradients)

    @jit_forbidden_register
    def swapped_optimizers_cannot_be_compiled(
        self, gradients: Sequence[Tensor]
    ) -> tuple[bool, ...]:
        """Update the parameters eagerly. MindSpore's compiler refuses this method by name."""
        self._swap.step(gradients)
        return (True,) * len(gradients)

    def swap_report(self) -> SwapReport:
        """Tell what swaps and what stays and why, bytes on host and device, and the last times.

        States that were loaded since the last update are moved to the host first.
        """
        self._swap.adopt()
        return self._swap.report()

    @contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """Write what updates inside ``with`` do, and when, to ``file``; also if they raise.

        A Chrome trace: open it at https://ui.perfetto.dev, or draw it with
        ``python -m swap_core trace FILE --plot PNG``. It has a lane each for loads, updates,
        stores, waits of the compute stream, and the host. Meant for a few updates: each costs
        some events, and all are kept until the end, which blocks until they have happened.

        Raises:
            OSError: the file cannot be written; nothing was run.
            RuntimeError: this optimizer is being traced already.
        """
        with self._swap.trace(file):
            yield

    def extend_repr(self) -> str:
        """Tell in one line that this optimizer swaps, and how much."""
        engine = self._swap
        way = "packed" if engine.packed else "per tensor"
        return (
            f"swapped: {way}, swap_times={engine.config.swap_times}, "
            f"{formatted(engine.ledger.host_bytes)} on host, {len(self.parameters)} params"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # noqa: ANN401
        """Load as natively, and take the loaded states to the host at once."""
        result = super().load_state_dict(state_dict, strict)
        self._swap.adopt()
        return result

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this Cell's part, and accept what its own ``state_dict()`` gives.

        Natively every name with a dot in it counts as unexpected, ``moment1.w`` among them, so
        that an optimizer's own state dict can only be loaded with ``strict=False``.
        """
        unexpected: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
        )
        known = {prefix + name for name in self._params}
        unexpected_keys += [key for key in unexpected if key not in known]


def make_engine(
    optimizer: nn.Optimizer, config: SwapOptimizerConfig, device: AnyMindSporeDevice | None
) -> SwapEngine:
    """Make the engine for an optimizer, after checking that it can swap.

    Raises:
        ValueError: the optimizer, an option of it, or the config is not supported.
    """
    adapter = find_adapter(optimizer, "mindspore")(optimizer)  # type: ignore[call-arg]
    if not isinstance(adapter, MindSporeSwapAdapter):
        raise TypeError(
            f"The adapter {type(adapter).__qualname__} is registered as 'mindspore.…' but is no "
            f"MindSporeSwapAdapter."
        )
    adapter.validate(config)
    if device is None and optimizer.target != ms.get_context("device_target"):
        raise UnsupportedOptionError(
            f"swap_optimizer: optimizer.target={optimizer.target!r} is not supported: it moves "
            f"the update itself to the host. Leave it {ms.get_context('device_target')!r}."
        )
    return SwapEngine(adapter, config, device)


def turn_into_swap_optimizer(optimizer: nn.Optimizer, engine: SwapEngine) -> None:
    """Give ``optimizer`` its new class and ``engine``. See [Note: in place]."""
    optimizer.__dict__["_swap"] = engine
    optimizer.__class__ = _swap_class(type(optimizer), engine.adapter.borrowers)


_classes: dict[type[nn.Optimizer], type[nn.Optimizer]] = {}
"""The subclass of each class whose instances were wrapped."""


def _swap_class(
    base: type[nn.Optimizer], borrowers: Mapping[str, Collection[str]]
) -> type[nn.Optimizer]:
    if base not in _classes:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        methods = {
            name: _borrowing(getattr(base, name), keys)
            for name, keys in borrowers.items()
            if name in dir(base)
        }
        attributes = {**names, **methods, "__doc__": base.__doc__, "_swap_base": base}
        _classes[base] = type(base.__name__, (MindSporeSwapOptimizer, base), attributes)
    return _classes[base]


def _borrowing(method: Callable[..., Any], keys: Collection[str]) -> Callable[..., Any]:
    """Let a method of the optimizer find states of ``keys`` on the device."""

    @wraps(method)
    def borrowing(self: MindSporeSwapOptimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with self._swap.lent(keys):
            return method(self, *args, **kwargs)

    return borrowing
