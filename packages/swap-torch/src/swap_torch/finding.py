# SPDX-License-Identifier: Apache-2.0
"""Which adapter an optimizer gets, and why some get none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch.optim import Optimizer

from swap_core import UnsupportedOptimizerError, find_adapter
from swap_torch.adapter import TorchSwapAdapter
from swap_torch.matching import qualified_name

__all__ = ["find_torch_adapter"]

_WHY_NOT = {
    "torch.optim.lbfgs.LBFGS": "LBFGS updates all parameters together, from one history of "
    "gradients, and evaluates its closure several times, so nothing of it can be updated alone.",
    "torch.optim.sparse_adam.SparseAdam": "SparseAdam updates the rows that a sparse gradient "
    "names; swapping would move whole states for them.",
    "torchao.optim.cpu_offload.CPUOffloadOptimizer": "It keeps states on the host itself, and "
    "updates them there; swap_optimizer takes the optimizer inside.",
    "torchao.optim.adam._AdamW": "It is for quantized parameters, which swapping was not tried "
    "with; for others take AdamW of torch.optim.",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "It shares its "
    "updates out among processes itself; use FSDP2, with an optimizer that swaps.",
}
"""By qualified name, so that nothing is imported for it."""


def find_torch_adapter(optimizer: object) -> type[TorchSwapAdapter]:
    """Find the installed adapter for ``optimizer``.

    Raises:
        UnsupportedOptimizerError: there is none; the message lists what is supported, and says why
            this one is not if that is known.
        TypeError: the adapter that was found is none for torch.
    """
    try:
        adapter = find_adapter(optimizer, "torch")
    except UnsupportedOptimizerError as error:
        why = _why_not(optimizer)
        if not why:
            raise
        raise UnsupportedOptimizerError(f"{error} {why}") from None
    if not issubclass(cast("type[object]", adapter), TorchSwapAdapter):
        raise TypeError(
            f"The adapter {adapter.__qualname__} is registered as 'torch.…' but is no "
            f"TorchSwapAdapter."
        )
    return cast("type[TorchSwapAdapter]", adapter)


def _why_not(optimizer: object) -> str:
    for kind in type(optimizer).__mro__:
        known = _WHY_NOT.get(qualified_name(kind))
        if known is not None:
            return known
    inner = [f"{name} ({type(each).__qualname__})" for name, each in _inner_optimizers(optimizer)]
    if not inner:
        return ""
    return (
        f"It holds other optimizers: {', '.join(inner)}. Give each of them to swap_optimizer; it "
        f"changes them in place, so this one goes on holding them."
    )


def _inner_optimizers(optimizer: object) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers among the attributes of an object, and in lists and dicts there."""
    if not isinstance(optimizer, Optimizer):
        return
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            named = ((f"{name}[{i}]", each) for i, each in enumerate(value))
            yield from ((n, each) for n, each in named if isinstance(each, Optimizer))
        elif isinstance(value, dict):
            named = ((f"{name}[{key!r}]", each) for key, each in value.items())
            yield from ((n, each) for n, each in named if isinstance(each, Optimizer))
