# SPDX-License-Identifier: Apache-2.0
"""The two functions that users call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.optim import Optimizer

from swap_core import AlreadyWrappedError, SwapOptimizerConfig, UnsupportedOptimizerError
from swap_torch.adapter import TorchSwapAdapter
from swap_torch.announcing import announce_host_memory, warn_if_nothing_swaps
from swap_torch.device import AnyTorchDevice
from swap_torch.optimizer import TorchSwapOptimizer, make_engine, turn_into_swap_optimizer

__all__ = ["is_swap_optimizer", "swap_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def swap_optimizer(
    optimizer: OptimizerT,
    config: SwapOptimizerConfig | None = None,
    *,
    device: AnyTorchDevice | None = None,
    adapter: type[TorchSwapAdapter] | None = None,
) -> OptimizerT:
    """Keep the states of ``optimizer`` in pinned host memory between updates.

    Afterwards ``optimizer.step()`` brings them to the device batch by batch; results are the same
    bits as before. Everything else stays as it was: schedulers, scalers, hooks, state dicts.

    - At wrapping: states that exist move to the host, and their device memory is free.
    - In ``step()``: at most ``staging_buffers`` batches of states are on the device.
    - Between updates: swapped states have no device memory; ``optimizer.state`` shows the host
      tensors.

    Args:
        optimizer: Any optimizer of ``torch.optim`` that updates each parameter by itself (all but
            ``LBFGS`` and ``SparseAdam``), HyperParallel's ``AdamW``, torchao's with quantized
            states, or one for which an adapter is installed or given. It is changed in place: the
            same object, of a subclass of its class.
        config: How to swap; None: ``SwapOptimizerConfig()``.
        device: An explicit device, for tests and special memory; used for parameters on its
            ``torch_device``. None: the accelerator of each parameter.
        adapter: The adapter class for this optimizer, such as a subclass of
            :class:`PerParameterAdapter`. None: the installed one that matches.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: the optimizer, one of its options, or the config is not supported, or the
            optimizer swaps already. Nothing was changed.

    Warns:
        UserWarning: no state can swap (for example, all parameters are on the CPU).
        RuntimeWarning: host memory could not be pinned.
        swap_core.HostMemoryWarning: the host has less memory than all states will need. What is
            needed and free is also logged, at level INFO, by the logger ``swap_torch``. If a filter
            makes an error of one of these warnings, nothing was changed.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=16))
    """
    if is_swap_optimizer(optimizer):
        raise AlreadyWrappedError(
            f"swap_optimizer: {optimizer!r} swaps already. Wrap it once; to change the config, "
            f"make the optimizer anew and load its state dict."
        )
    if config is not None and not isinstance(config, SwapOptimizerConfig):
        raise ValueError(
            f"swap_optimizer: config={config!r} is not accepted; give a SwapOptimizerConfig, such "
            f"as SwapOptimizerConfig(swap_times=32), or None."
        )
    _refuse_replaced_step(optimizer)
    engine = make_engine(optimizer, config or SwapOptimizerConfig(), device, _checked(adapter))
    with _states_kept_on_error(optimizer):
        engine.adopt(optimizer.state)
        # Before it is of another class: a filter may make an error of a warning.
        warn_if_nothing_swaps(engine)
        announce_host_memory(engine)
    turn_into_swap_optimizer(optimizer, engine)
    return optimizer


def is_swap_optimizer(obj: object) -> bool:
    """Tell whether ``obj`` is an optimizer whose states swap."""
    return isinstance(obj, TorchSwapOptimizer)


@contextmanager
def _states_kept_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Put states that were moved back if anything is raised."""
    before = [(entry, dict(entry)) for entry in optimizer.state.values()]
    try:
        yield
    except BaseException:
        for entry, states in before:
            entry.clear()
            entry.update(states)
        raise


def _checked(adapter: object) -> type[TorchSwapAdapter] | None:
    if adapter is None or (isinstance(adapter, type) and issubclass(adapter, TorchSwapAdapter)):
        return adapter
    raise ValueError(
        f"swap_optimizer: adapter={adapter!r} is not accepted; give a class derived from "
        f"swap_torch.PerParameterAdapter (or another TorchSwapAdapter), or None."
    )


def _refuse_replaced_step(optimizer: object) -> None:
    """Refuse an instance whose ``step`` somebody other than a scheduler replaced."""
    if not isinstance(optimizer, Optimizer):
        return  # find_adapter says what is supported
    step = vars(optimizer).get("step")
    if step is not None and "_wrapped_by_lr_sched" not in vars(step):
        raise UnsupportedOptimizerError(
            f"swap_optimizer: optimizer.step was replaced on this {type(optimizer).__name__} by "
            f"{step!r}, which would still run the native update. Call swap_optimizer before the "
            f"code that replaces it."
        )
