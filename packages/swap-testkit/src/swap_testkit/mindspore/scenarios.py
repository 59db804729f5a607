# SPDX-License-Identifier: Apache-2.0
"""Ready-made trainings, on one process and on several."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from swap_mindspore import is_swap_optimizer
from swap_testkit.mindspore.copies import CopyTrainer
from swap_testkit.mindspore.model import (
    LanguageModel,
    ModelShape,
    lm_loss,
    text_batch,
    unit_initialised,
)
from swap_testkit.mindspore.optimizers import Kind
from swap_testkit.mindspore.trainer import Job, JobTrainer, OptimizerFactory, Trainer
from swap_testkit.mindspore.world import World

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way of training."""

    name: str
    about: str
    build: Callable[[OptimizerFactory, int, World], Job]
    """From an optimizer factory, a seed and a place to a job."""
    worlds: tuple[int, ...] = (1,)
    """On how many processes it runs."""
    sharded: bool = False
    """Whether each process's optimizer has its rows of every parameter only."""
    cards_only: bool = False
    """Whether the CPU build lacks what it needs."""

    def trainer(self, kind: Kind, seed: int, world: World) -> Trainer:
        """Make the trainer of this process, the same each time."""
        ms.set_seed(seed)
        job = self.build(kind.make, seed, world)
        # What is sharded by HyperParallel is updated as it is, in fp32.
        if self.sharded or (kind.mindformers and not self.cards_only):
            return CopyTrainer(job, kind.dtype_of, world, sharded=self.sharded)
        return JobTrainer(job)


def lm_batch_loss(net: nn.Cell, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch of text."""
    return lm_loss(net(batch[0]), batch[1])


def _net(seed: int, *, recompute: bool = False) -> nn.Cell:
    return unit_initialised(LanguageModel(ModelShape(layers=1), recompute=recompute), seed)


def _single(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    return Job(_net(seed), optimizer, text_batch, lm_batch_loss)


def _recompute(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    return Job(_net(seed, recompute=True), optimizer, text_batch, lm_batch_loss)


def _clip(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    return Job(_net(seed), optimizer, text_batch, lm_batch_loss, clip_norm=0.1)


def _groups(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    def in_groups(params: list[Parameter]) -> nn.Optimizer:
        decay = [param for param in params if len(param.shape) > 1]
        rest = [param for param in params if len(param.shape) <= 1]
        groups: list[Any] = [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest, "lr": 5e-3},
            {"order_params": params},
        ]
        return optimizer(groups)

    return Job(_net(seed), in_groups, text_batch, lm_batch_loss)


def _checkpoint(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    def there_and_back(live: nn.Optimizer, step: int) -> None:
        # The native run goes on uninterrupted. On the CPU it had to: a compiled native update goes
        # on with the tensors that it knows, whatever is loaded.
        if step == 1 and is_swap_optimizer(live):
            _load(live, live)

    return Job(_net(seed), optimizer, text_batch, lm_batch_loss, before=there_and_back)


def _fresh_load(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    def load_what_another_trained(live: nn.Optimizer, step: int) -> None:
        if step != 0:
            return
        copies = [Parameter(param.asnumpy().copy(), name=param.name) for param in net_params]
        trained = optimizer(copies)
        trained(tuple(ops.ones_like(param) * 0.01 for param in trained.parameters))
        _load(trained, live)
        for param, copy in zip(live.parameters, trained.parameters, strict=True):
            param.set_data(copy)

    net = _net(seed)
    net_params = net.trainable_params()
    return Job(net, optimizer, text_batch, lm_batch_loss, before=load_what_another_trained)


def _load(source: nn.Optimizer, target: nn.Optimizer) -> None:
    """Save one optimizer to a file, and load that into another, or the same."""
    with tempfile.TemporaryDirectory(prefix="swap-testkit-") as folder:
        path = str(Path(folder) / "optimizer.ckpt")
        ms.save_checkpoint(source, path)
        ms.load_param_into_net(target, ms.load_checkpoint(path), strict_load=True)


def _data_parallel(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    def own_text(step: int) -> tuple[Tensor, Tensor]:
        return text_batch(step, stream=world.rank)

    return Job(_net(seed), optimizer, own_text, lm_batch_loss, reduce=world.mean)


class Mlp(nn.Cell):
    """A column-parallel layer, then a row-parallel one: each process has its part of the middle.

    Args:
        seed: For all processes' weights together.
        world: This process among the others.
        width: Of input and output.
        hidden: Of the middle, over all processes.
    """

    def __init__(self, seed: int, world: World, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        values = np.random.default_rng(seed)
        first = values.standard_normal((width, hidden), np.float32) * width**-0.5
        second = values.standard_normal((hidden, width), np.float32) * hidden**-0.5
        mine = slice(world.rank * hidden // world.size, (world.rank + 1) * hidden // world.size)
        self.first = Parameter(Tensor(first[:, mine].copy()), name="first")
        self.second = Parameter(Tensor(second[mine].copy()), name="second")
        self.world = world

    def construct(self, x: Tensor) -> Tensor:
        """Shape (batch, width) to the same."""
        return self.world.sum(ops.matmul(ops.tanh(ops.matmul(x, self.first)), self.second))


def _tensor_parallel(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    def numbers(step: int) -> Tensor:
        values = np.random.default_rng((seed, step))
        return Tensor(values.standard_normal((8, 32), np.float32))

    def loss(net: nn.Cell, batch: Tensor) -> Tensor:
        # The gradient of AllReduce sums what all processes send back, which is the same on each.
        return ((net(batch) - batch) ** 2).mean() / world.size

    return Job(Mlp(seed, world), optimizer, numbers, loss)


def _fully_shard(optimizer: OptimizerFactory, seed: int, world: World) -> Job:
    """HyperParallel's own, on a mesh of two replicas of two shards. Never run: it needs cards."""
    from hyper_parallel import init_device_mesh
    from hyper_parallel.core.fully_shard.api import fully_shard

    net = _net(seed)
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def own_text(step: int) -> tuple[Tensor, Tensor]:
        return text_batch(step, stream=world.rank)

    return Job(net, optimizer, own_text, lm_batch_loss)


SEVERAL = (2, 4)
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("single", "a small language model on real text", _single),
        Scenario("groups", "groups with a learning rate and weight decay of their own", _groups),
        Scenario("recompute", "each block computed again in the backward pass", _recompute),
        Scenario("clip", "gradients clipped by their global norm", _clip),
        Scenario("checkpoint", "swapped saved to a file and loaded on the way", _checkpoint),
        Scenario("fresh-load", "trained states loaded before the first step", _fresh_load),
        Scenario(
            "data-parallel", "a batch for each process, mean of gradients", _data_parallel, SEVERAL
        ),
        Scenario(
            "zero", "the same, and each process updates its rows", _data_parallel, SEVERAL, True
        ),
        Scenario("tensor-parallel", "column, then row parallel layers", _tensor_parallel, SEVERAL),
        Scenario(
            "fully-shard",
            "HyperParallel's fully_shard, two replicas of two shards (cards only)",
            _fully_shard,
            (4,),
            cards_only=True,
        ),
    )
}
