# SPDX-License-Identifier: Apache-2.0
"""The class that a wrapped optimizer gets.

[Note: in place]
Wrapping changes the class of the optimizer object to a subclass of its own class, as
``fully_shard`` does with modules. So ``isinstance(optimizer, AdamW)`` holds, schedulers, scalers
and trainers that got the object before wrapping keep working, and there is no inner optimizer that
could be stepped by mistake.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, overload

import torch
from torch.optim import Optimizer

from swap_core import HostMemory, SwapOptimizerConfig, SwapReport, format_bytes
from swap_torch.adapter import TorchSwapAdapter
from swap_torch.device import AnyTorchDevice
from swap_torch.engine import SwapEngine
from swap_torch.finding import find_torch_adapter
from swap_torch.phases import Phase
from swap_torch.reading import read_state_dict
from swap_torch.scheduled import step_seen_by_scheduler
from swap_torch.watching import traced

__all__ = ["TorchSwapOptimizer", "make_engine", "turn_into_swap_optimizer"]


class TorchSwapOptimizer(Optimizer):
    """An optimizer whose states are on the host between updates.

    Never instantiated itself: :func:`swap_torch.swap_optimizer` combines it with the class of the
    optimizer that it is given.
    """

    _swap_base: ClassVar[type[Optimizer]]
    """The class that the optimizer had before."""

    _swap: SwapEngine

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states, current: waits for the stores of the latest update, if any are in flight.

        Tensors in it that swap are on the CPU, and are the storage between updates: values written
        into them, or other tensors put in their place, are used by the next update. A tensor taken
        out before a later ``step()`` may be read and written after it only once ``state`` was
        looked at again: until then the last stores of that update may be under way, and with
        ``zigzag`` a batch is still on the device.
        """
        if "_swap" in self.__dict__:
            self._swap.show()
        state: defaultdict[torch.Tensor, Any] = self.__dict__["state"]
        return state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.__dict__["state"] = state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters, streaming states through the device batch by batch.

        Queues work on the current stream, on which results are valid, and does not block the host.

        Args:
            closure: Refused, unless the config says ``allow_closure=True``; then evaluated once,
                with gradients enabled, before the first batch.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: a closure that is not allowed; nothing was evaluated.
            RuntimeError: a sparse gradient; nothing was updated.
            torch.OutOfMemoryError: no device memory for a batch. Batches before it are updated.
        """
        loss = None
        if closure is not None:
            if not self._swap.config.allow_closure:
                raise ValueError(
                    f"{type(self).__name__}.step() got a closure ({closure!r}), which a swapped "
                    f"optimizer does not take by default. Call backward() and then step(), or "
                    f"pass SwapOptimizerConfig(allow_closure=True) to have it evaluated once "
                    f"before the update (trainers such as Lightning always pass one)."
                )
            with torch.enable_grad():
                loss = closure()
        self._swap_update()
        return loss

    # A compiled function that calls step() runs it as it is: streams and plans are not for tracing.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # not exported by name
    def _swap_update(self) -> None:
        self._swap.step(self.__dict__["state"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients as natively; what was loaded ahead for them is given up."""
        self._swap.gradients_dropped()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as natively, after checking that its options can be combined with swapping.

        Raises:
            ValueError: an option of the group is not supported; nothing was added.
            RuntimeError: with ``overlap_backward``, between a backward pass that has updated
                parameters and ``step()``; nothing was added.
        """
        complete: Mapping[str, Any] = {**self.defaults, **param_group}
        index = len(self.param_groups)
        self._swap.adapter.validate_group(complete, f"the new param group {index}")
        self._swap.group_added()
        super().add_param_group(param_group)

    # Checkpoints.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of this or of a native optimizer returned.

        From host to host, with native's casts; nothing of ``state_dict`` is kept or changed.
        Options, such as the learning rate, come from it too, as natively.

        Raises:
            ValueError: it does not fit this optimizer; names group, parameter and key. Nothing was
                changed.
        """

        def take(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            return self._swap_take(state_dict)

        # After the hooks of users, which may edit the state dict; native does the rest.
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _swap_take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load the states, and leave the rest to native."""
        entries = read_state_dict(self, self._swap_base, self._swap.adapter, state_dict)
        groups = copy.deepcopy(state_dict["param_groups"])
        ours = {number for group in groups for number in group["params"]}
        present = [self.__dict__.pop("state")]
        try:
            loaded = self._swap.load(entries, present)
        except BaseException:
            self.state = present.pop()
            raise
        self.state = loaded
        # For __setstate__, which native calls with the new groups.
        self.__dict__["_swap_loaded"] = loaded
        others = {key: value for key, value in state_dict["state"].items() if key not in ours}
        return {**state_dict, "state": others, "param_groups": groups}

    # Phases.

    def reload(self) -> None:
        """Bring all states to the device, where they stay until :meth:`offload`.

        For phases of many updates with memory to spare: updates then move nothing and run as
        natively, with the same bits. ``optimizer.state`` shows device tensors. Blocks until they
        are there. Any number of times, and before the first step.

        Raises:
            torch.OutOfMemoryError: they do not fit; nothing was moved.
        """
        self._swap.enter(Phase.ON_DEVICE, self.state)

    def offload(self) -> None:
        """Bring all states to the host, also those that stay on the device between updates.

        After :meth:`reload`, or to clear the device for another phase. Updates swap as before; the
        first one brings what stays on the device back. Blocks until the states are on the host. Any
        number of times, and before the first step.
        """
        self._swap.enter(Phase.OFFLOADED, self.state)

    @contextmanager
    def states_on_device(self) -> Iterator[None]:
        """All states are on the device inside ``with``, and where they were before after it.

        For code that reads or edits states there; edits are kept. Updates may be made inside.
        """
        before = self._swap.phase
        self.reload()
        try:
            yield
        finally:
            self._swap.enter(before, self.state)

    def swap_report(self) -> SwapReport:
        """Tell what swaps and what stays and why, bytes on host and device, and the last times.

        Waits for the stores of the latest update; with ``overlap_backward`` also for the backward
        pass in which it was made.
        """
        return self._swap.report(self.state)

    def host_memory(self) -> HostMemory:
        """Tell how much host memory all states need, and how much there is.

        States that do not exist yet are included. ``LOCAL_WORLD_SIZE``, which torchrun sets, tells
        how many processes share the host.
        """
        return self._swap.host_memory()

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
        with traced(self._swap, file):
            yield

    def __repr__(self) -> str:
        """Tell in one line that this optimizer swaps, and how much."""
        engine = self._swap
        how = "packed" if engine.packed else "per tensor"
        if engine.phase is not Phase.SWAPPED:
            how += f", now {engine.phase.value}"
        groups = len(self.param_groups)
        params = sum(len(group["params"]) for group in self.param_groups)
        return (
            f"{type(self).__name__}(swapped: {how}, swap_times={engine.config.swap_times}, "
            f"{format_bytes(engine.ledger.host_bytes)} on host, {groups} groups, {params} params)"
        )

    # Copies and pickles. Native __getstate__ gives defaults, state and param_groups only.

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Make a new swapped optimizer with the same config from the native state."""
        engine = self._swap
        # Of states on the device the copy takes those that swap to the host at once.
        phase = Phase.OFFLOADED if engine.phase is Phase.OFFLOADED else Phase.SWAPPED
        arguments = (self._swap_base, type(engine.adapter), engine.config, engine.device, phase)
        return _blank, arguments, {**self.__getstate__(), "state": self.state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over states, from a pickle or from :meth:`load_state_dict`."""
        loaded = self.__dict__.pop("_swap_loaded", None)
        if loaded is not None:
            loaded.update(state["state"])
            state = {**state, "state": loaded}
        super().__setstate__(state)
        if "_swap" not in self.__dict__:
            kind, config, device, phase = self.__dict__.pop("_swap_arguments")
            self._swap = SwapEngine(kind(self), config, device, phase)
            self.register_state_dict_post_hook(_snapshot, prepend=True)
        self._swap.adopt(self.__dict__["state"])


def make_engine(
    optimizer: Optimizer,
    config: SwapOptimizerConfig,
    device: AnyTorchDevice | None,
    kind: type[TorchSwapAdapter] | None = None,
) -> SwapEngine:
    """Make the engine for an optimizer, after checking that it can swap.

    Args:
        optimizer: Not wrapped yet.
        config: How to swap.
        device: Given explicitly by the user, or None.
        kind: The adapter class; None: the installed one that matches.

    Raises:
        ValueError: the optimizer, an option of it, or the config is not supported.
    """
    adapter = (kind or find_torch_adapter(optimizer))(optimizer)
    adapter.validate(config)
    return SwapEngine(adapter, config, device)


def turn_into_swap_optimizer(optimizer: Optimizer, engine: SwapEngine) -> None:
    """Give ``optimizer`` its new class and ``engine``. See [Note: in place]."""
    scheduled_step = optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_swap"] = engine
    optimizer.__class__ = _swap_class(type(optimizer))
    # Native does this in __init__: it puts the hook wrapper around the class's step.
    optimizer._patch_step_function()
    optimizer.register_state_dict_post_hook(_snapshot, prepend=True)
    if scheduled_step is not None:
        optimizer.__dict__["step"] = step_seen_by_scheduler(optimizer)


def _snapshot(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The first of the hooks that a state dict goes through."""
    engine: SwapEngine = optimizer.__dict__["_swap"]
    return engine.snapshot(state_dict)


_classes: dict[type[Optimizer], type[Optimizer]] = {}
"""The subclass of each class whose instances were wrapped: classes only, never optimizers."""


def _swap_class(base: type[Optimizer]) -> type[Optimizer]:
    if base not in _classes:
        # Trainers name metrics by the class, so the name stays; repr() says that it swaps.
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        attributes = {**names, "__doc__": base.__doc__, "_swap_base": base}
        _classes[base] = type(base.__name__, (TorchSwapOptimizer, base), attributes)
    return _classes[base]


def _blank(
    base: type[Optimizer],
    adapter: type[TorchSwapAdapter],
    config: SwapOptimizerConfig,
    device: AnyTorchDevice | None,
    phase: Phase,
) -> Optimizer:
    """An object for ``__setstate__`` to fill."""
    kind = _swap_class(base)
    optimizer = kind.__new__(kind)
    optimizer.__dict__["_swap_arguments"] = (adapter, config, device, phase)
    return optimizer
