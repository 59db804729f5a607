# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors: the part that this rank holds, and the wrapper around it.

Two classes wrap a local tensor in ``_local_tensor``: torch's DTensor, and HyperParallel's
(``hyper_parallel.core.dtensor.dtensor.DTensor``, which in March 2026 was still in
``hyper_parallel.core.dtensor``; matched by name and never imported).

Adam is element-wise, so it runs on local shards, with the bits of the wrapper's own dispatch and
without its cost. ``_local_tensor`` and not ``to_local()``: the latter makes a new autograd view on
each call (8 us each, 816 parameters and three tensors each make 20 ms).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from swap_torch.matching import qualified_name

__all__ = [
    "is_sharded",
    "largest_shard",
    "local_gradients",
    "local_of",
    "locals_of",
    "placed_alike",
    "wrap_like",
]

_HYPER_NAMES = {
    "hyper_parallel.core.dtensor.dtensor.DTensor",
    "hyper_parallel.core.dtensor.DTensor",
}


_LOCAL: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
_SPEC: Callable[[torch.Tensor], object] = attrgetter("_spec")
_LAYOUT: Callable[[object], tuple[object, ...]] = attrgetter("placements", "mesh")
"""Of a spec: what must agree."""


class _Wrapper(Enum):
    """What a tensor's class does with its values."""

    NONE = "has them"
    DTENSOR = "torch's DTensor: has _local_tensor and _spec; its gradient is a DTensor"
    HYPER = "HyperParallel's DTensor: shares its local tensor's storage; its gradient is local"


_wrappers: dict[type, _Wrapper] = {}
"""The answer for each class that was asked about."""


def _wrapper_of(kind: type) -> _Wrapper:
    known = _wrappers.get(kind)
    if known is not None:
        return known
    # Nobody can have a DTensor before its module is there, and importing that takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    names = set(map(qualified_name, kind.__mro__))
    if module is not None and module.DTensor in kind.__mro__:
        found = _Wrapper.DTENSOR
    else:
        found = _Wrapper.HYPER if names & _HYPER_NAMES else _Wrapper.NONE
    _wrappers[kind] = found
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` wraps a local tensor."""
    return _wrapper_of(type(tensor)) is not _Wrapper.NONE


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's values; ``tensor`` itself if it is not sharded."""
    if _wrapper_of(type(tensor)) is _Wrapper.NONE:
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`local_of` each, faster where all are torch's DTensors."""
    if _all_dtensors(tensors):
        return list(map(_LOCAL, tensors))
    return list(map(local_of, tensors))


def largest_shard(tensor: torch.Tensor) -> torch.Size:
    """The shape of the largest shard that a process has; the same answer in every process."""
    if _wrapper_of(type(tensor)) is not _Wrapper.DTENSOR:
        return local_of(tensor).shape
    shape = list(tensor.shape)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    for dimension, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate() and not placement.is_partial():
            shape[placement.dim] = -(-shape[placement.dim] // mesh.size(dimension))
    return torch.Size(shape)


def _all_dtensors(tensors: Iterable[torch.Tensor]) -> bool:
    return all(_wrapper_of(kind) is _Wrapper.DTENSOR for kind in set(map(type, tensors)))


def wrap_like(like: torch.Tensor, local: torch.Tensor, *, state_exists: bool) -> torch.Tensor:
    """Wrap the values of a state.

    Args:
        like: The state itself, or what it is natively made like.
        local: This rank's values, on the host.
        state_exists: Whether ``like`` is the state itself.
    """
    wrapper = _wrapper_of(type(like))
    if wrapper is _Wrapper.DTENSOR:
        # Its device is that of ``local``: a wrapper on another one cannot be detached or copied.
        # Its storage offset is that of ``local`` too, 0, which ``torch.save`` wants.
        make_sharded: Callable[..., torch.Tensor] = type(like)
        return make_sharded(local, like._spec, requires_grad=False)  # type: ignore[attr-defined]
    if wrapper is _Wrapper.HYPER and state_exists:
        make: Callable[..., torch.Tensor] = type(like)
        layout = {"device_mesh": like.device_mesh, "placements": like.placements}  # type: ignore[attr-defined]
        return make(local, **layout)
    # HyperParallel steps under its SkipDTensorDispatch, where zeros_like() of a DTensor is local.
    return local


def placed_alike(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> bool:
    """Tell whether each gradient has its parameter's placement, so that none needs reducing.

    Args:
        params: Sharded and plain parameters, mixed.
        grads: Their gradients, in the same order.
    """
    if not _all_dtensors(chain(params, grads)):
        return all(map(_same_placement, map(_spec_of, grads), map(_spec_of, params)))
    have, want = list(map(_SPEC, grads)), list(map(_SPEC, params))
    return all(map(is_, have, want)) or list(map(_LAYOUT, have)) == list(map(_LAYOUT, want))


def local_gradients(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The local gradients, redistributed first where their placement is not the parameter's."""
    return [_local_gradient(param, grad) for param, grad in zip(params, grads, strict=True)]


def _spec_of(tensor: torch.Tensor) -> object:
    if _wrapper_of(type(tensor)) is _Wrapper.DTENSOR:
        return tensor._spec  # type: ignore[attr-defined]
    return None


def _local_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if not _same_placement(_spec_of(grad), _spec_of(param)):
        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
        grad = grad.redistribute(mesh, placements)  # type: ignore[attr-defined]
    return local_of(grad)


def _same_placement(one: object, other: object) -> bool:
    """Whether two specs agree; so does what has none, which nothing can redistribute."""
    if one is other or one is None or other is None:
        return True
    return _LAYOUT(one) == _LAYOUT(other)
