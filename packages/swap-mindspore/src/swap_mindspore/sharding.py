# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's sharded tensors: Adam is element-wise, so it runs on each rank's own shard.

A ``DTensor`` there has the global shape and keeps this rank's shard in ``_local_tensor``, whose
storage is what is on the device. It is known by the name of its class, so that hyper-parallel need
not be installed. Its ``set_data`` with a plain Tensor replaces the shard, as here it should.
"""

from __future__ import annotations

from mindspore import Tensor

__all__ = ["local_of"]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; of everything else the thing itself."""
    if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
        return tensor._local_tensor
    return tensor
