# SPDX-License-Identifier: Apache-2.0
"""The two functions that users call."""

from __future__ import annotations

from typing import TypeVar

from mindspore import nn

from swap_core import AlreadyWrappedError, SwapOptimizerConfig
from swap_mindspore.device import AnyMindSporeDevice
from swap_mindspore.optimizer import MindSporeSwapOptimizer, make_engine, turn_into_swap_optimizer

__all__ = ["is_swap_optimizer", "swap_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=nn.Optimizer)


def swap_optimizer(
    optimizer: OptimizerT,
    config: SwapOptimizerConfig | None = None,
    *,
    device: AnyMindSporeDevice | None = None,
) -> OptimizerT:
    """Keep the states of ``optimizer`` in host memory between updates.

    Afterwards ``optimizer(gradients)`` brings them to the device batch by batch; results are the
    same bits as before. PyNative mode only; forward and backward may be compiled.

    - At wrapping: the states move to the host, and their device memory is free.
    - In an update: at most two batches of states are on the device.
    - Between updates: swapped states have no device memory; the optimizer's Parameters, such as
      ``optimizer.moment1[0]``, are bound to the host memory, so checkpoints work as before.

    Args:
        optimizer: ``mindspore.nn.Adam``, ``mindspore.nn.AdamWeightDecay``, or what an installed
            adapter is for, such as MindFormers' AdamW with swap-mindformers. It is changed in
            place: the same object, of a subclass of its class.
        config: How to swap; None: ``SwapOptimizerConfig()``.
        device: An explicit device, for tests. None: the Ascend card of this process; on the CPU
            there is no device memory to save, and nothing swaps.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: the optimizer, one of its options, the config, or graph mode is not supported,
            or the optimizer swaps already. Nothing was changed.

    Warns:
        UserWarning: no state can swap (for example, on the CPU).
        RuntimeWarning: host memory could not be pinned.

    Example:
        >>> optimizer = nn.Adam(net.trainable_params(), learning_rate=1e-3)
        >>> optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=16))
    """
    if is_swap_optimizer(optimizer):
        raise AlreadyWrappedError(
            f"swap_optimizer: {optimizer!r} swaps already. Wrap it once; to change the config, "
            f"make the optimizer anew and load its parameters."
        )
    if config is not None and not isinstance(config, SwapOptimizerConfig):
        raise ValueError(
            f"swap_optimizer: config={config!r} is not accepted; give a SwapOptimizerConfig, such "
            f"as SwapOptimizerConfig(swap_times=32), or None."
        )
    engine = make_engine(optimizer, config or SwapOptimizerConfig(), device)
    turn_into_swap_optimizer(optimizer, engine)
    engine.warn_if_nothing_swaps()
    return optimizer


def is_swap_optimizer(obj: object) -> bool:
    """Tell whether ``obj`` is an optimizer whose states swap."""
    return isinstance(obj, MindSporeSwapOptimizer)
