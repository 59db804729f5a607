# SPDX-License-Identifier: Apache-2.0
"""Make any model data-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Parallel", "Place", "parallelize"]


class Parallel(Enum):
    """Ways to train any model on several processes."""

    NONE = "none"
    """As it is: one process, or a model that its builder has made parallel."""
    DDP = "ddp"
    """DistributedDataParallel."""
    FSDP = "fsdp"
    """FSDP2: ``fully_shard`` on each block of a ``ModuleList`` and on the whole."""
    HSDP = "hsdp"
    """FSDP2 over pairs of ranks, replicated over the pairs."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is."""

    rank: int
    world: int
    device: torch.device
    """On which it trains."""

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A device mesh over all ranks."""
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


def parallelize(
    model: nn.Module,
    kind: Parallel,
    place: Place,
    *,
    param_dtype: torch.dtype | None = None,
    reshard: bool = True,
) -> nn.Module:
    """Make ``model`` parallel in place, and return what to call in its stead.

    Args:
        model: On its device.
        kind: How.
        place: Where this process is.
        param_dtype: FSDP2: type of parameters in forward and backward; gradients are reduced in
            fp32.
        reshard: FSDP2: free unsharded parameters after forward.
    """
    if kind is Parallel.NONE:
        return model
    if kind is Parallel.DDP:
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    mesh = _mesh(kind, place)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def _mesh(kind: Parallel, place: Place) -> DeviceMesh:
    if kind is Parallel.FSDP:
        return place.mesh(place.world)
    if place.world % 2:
        raise ValueError(
            f"parallel='hsdp' shards over pairs of ranks, but there are {place.world}; give an "
            f"even number of processes."
        )
    return place.mesh(place.world // 2, 2, names=("replicate", "shard"))


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]
