# SPDX-License-Identifier: Apache-2.0
"""A net that computes with fp32 copies of what the optimizer updates.

The optimizer's parameters may then be shards (ZeRO), in half precision (MindFormers' AdamW with its
masters), or both, without kernels that the CPU build lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import mindspore as ms
from mindspore import Parameter, Tensor

from swap_testkit.mindspore.trainer import Job, JobTrainer
from swap_testkit.mindspore.world import World

__all__ = ["CopyTrainer"]


@final
class CopyTrainer(JobTrainer):
    """Forward and backward with copies, reduce and clip, update, copy anew.

    Args:
        job: What to train, in fp32.
        dtype_of: The dtype in which the optimizer has a parameter.
        world: This process among the others.
        sharded: Whether each process has its rows only.
    """

    def __init__(
        self, job: Job, dtype_of: Callable[[Parameter], Any], world: World, *, sharded: bool
    ) -> None:
        self._copies = job.net.trainable_params()
        self._world = world
        self._sharded = sharded
        ours = [self._made(copy, dtype_of(copy)) for copy in self._copies]
        factory = job.optimizer
        super().__init__(replace(job, optimizer=lambda params: factory(ours)))
        self._gradient = ms.value_and_grad(
            lambda batch: job.loss(job.net, batch), None, self._copies
        )
        self._places = {param.name: i for i, param in enumerate(ours)}

    def train_step(self, step: int) -> Tensor:
        """Run one step.

        Returns:
            The loss, before the update.
        """
        loss, gradients = self.gradients(step)
        # In the optimizer's own order: groups may have another.
        places = [self._places[param.name] for param in self.optimizer.parameters]
        parts = [self._part(gradients[place]) for place in places]
        pairs = zip(parts, self.optimizer.parameters, strict=True)
        self.update(tuple(part.astype(param.dtype) for part, param in pairs))
        for place, param in zip(places, self.optimizer.parameters, strict=True):
            copy = self._copies[place]
            copy.set_data(self._world.whole(param.astype(ms.float32) + 0, copy.shape))
        return loss

    def _made(self, copy: Parameter, dtype: Any) -> Parameter:  # noqa: ANN401  # MindSpore's
        part = self._part(copy)
        param = Parameter(Tensor(part.asnumpy().copy()).astype(dtype), name=copy.name)
        # What the optimizer has is what counts: the first forward is with it, too.
        copy.set_data(self._world.whole(param.astype(ms.float32) + 0, copy.shape))
        return param

    def _part(self, value: Tensor) -> Tensor:
        return self._world.part(value) if self._sharded else value
