# SPDX-License-Identifier: Apache-2.0
"""One rank of parallel trainings, natively and swapped. Run by msrun; see test_parallel.py.

Writes what it found to ``<folder>/<rank>.json``. The CPU build has AllReduce and AllGather, from
which the three ways of training are made:

- data parallel: each rank has its own batch; gradients are averaged;
- ZeRO-style: each rank has a shard of every parameter and its optimizer only that;
- tensor parallel: a column-parallel layer, then a row-parallel one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from swap_mindspore import HostDevice, SwapOptimizerConfig, is_swap_optimizer, swap_optimizer
from swap_testkit.mindspore.world import join

WIDTH, HIDDEN, STEPS = 8, 16, 3
OPTIMIZERS: dict[str, Callable[[list[Parameter]], nn.Optimizer]] = {
    "adam": lambda params: nn.Adam(params, 0.01, weight_decay=0.01),
    "adam-weight-decay": lambda params: nn.AdamWeightDecay(params, 0.01, weight_decay=0.1),
}
Wrap = Callable[[nn.Optimizer], nn.Optimizer]


def swapped(optimizer: nn.Optimizer) -> nn.Optimizer:
    config = SwapOptimizerConfig(min_numel=0, swap_times=2)
    return swap_optimizer(optimizer, config, device=HostDevice(poison=True))


def weights() -> list[np.ndarray]:
    values = np.random.default_rng(0)
    shapes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return [values.standard_normal(shape).astype(np.float32) * 0.3 for shape in shapes]


def batch(step: int, stream: int) -> Tensor:
    values = np.random.default_rng((step, stream))
    return Tensor(values.standard_normal((4, WIDTH)).astype(np.float32))


def parameters(arrays: Sequence[np.ndarray]) -> list[Parameter]:
    return [Parameter(Tensor(np.array(a, order="C")), name=f"w{i}") for i, a in enumerate(arrays)]


def loss_of(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return ((ops.matmul(ops.tanh(ops.matmul(x, first)), second) - x) ** 2).mean()


class World:
    """This rank among the others."""

    def __init__(self) -> None:
        joined = join()
        self.rank, self.size = joined.rank, joined.size
        self.sum, self.gather = ops.AllReduce(), ops.AllGather()

    def shard(self, array: np.ndarray, axis: int) -> np.ndarray:
        return np.split(array, self.size, axis)[self.rank]

    def data_parallel(self, make: Callable[..., nn.Optimizer], wrap: Wrap):
        params = parameters(weights())
        optimizer = wrap(make(params))
        gradient = ms.value_and_grad(lambda x: loss_of(x, *params), None, params)
        losses = []
        for step in range(STEPS):
            loss, grads = gradient(batch(step, self.rank))
            optimizer(tuple(self.sum(grad) / self.size for grad in grads))
            losses.append(float(loss.asnumpy()))
        return optimizer, losses, [param.asnumpy() for param in params]

    def zero(self, make: Callable[..., nn.Optimizer], wrap: Wrap):
        full = parameters(weights())
        shards = parameters([self.shard(array, 0) for array in weights()])
        optimizer = wrap(make(shards))
        gradient = ms.value_and_grad(lambda x: loss_of(x, *full), None, full)
        losses = []
        for step in range(STEPS):
            loss, grads = gradient(batch(step, self.rank))
            means = [(self.sum(grad) / self.size).asnumpy() for grad in grads]
            optimizer(tuple(Tensor(np.array(self.shard(mean, 0))) for mean in means))
            for param, part in zip(full, shards, strict=True):
                param.set_data(self.gather(part + 0))
            losses.append(float(loss.asnumpy()))
        return optimizer, losses, [param.asnumpy() for param in full]

    def tensor_parallel(self, make: Callable[..., nn.Optimizer], wrap: Wrap):
        first, second = weights()
        params = parameters([self.shard(first, 1), self.shard(second, 0)])
        optimizer = wrap(make(params))

        def forward(x: Tensor) -> Tensor:
            partial = ops.matmul(ops.tanh(ops.matmul(x, params[0])), params[1])
            # The gradient of AllReduce sums what all ranks send back, which is the same on each.
            return ((self.sum(partial) - x) ** 2).mean() / self.size

        gradient = ms.value_and_grad(forward, None, params)
        losses = []
        for step in range(STEPS):
            loss, grads = gradient(batch(step, 0))
            optimizer(grads)
            losses.append(float(loss.asnumpy()) * self.size)
        columns = self.gather(params[0].transpose(1, 0) + 0).transpose(1, 0)
        return optimizer, losses, [columns.asnumpy(), self.gather(params[1] + 0).asnumpy()]


def serial(make: Callable[..., nn.Optimizer], streams: int) -> list[np.ndarray]:
    """The same training on one process with whole batches and whole parameters."""
    params = parameters(weights())
    optimizer = make(params)
    gradient = ms.value_and_grad(lambda x: loss_of(x, *params), None, params)
    for step in range(STEPS):
        every = [gradient(batch(step, stream))[1] for stream in range(streams)]
        optimizer(tuple(sum(grads) / streams for grads in zip(*every, strict=True)))
    return [param.asnumpy() for param in params]


def bits_of(optimizer: nn.Optimizer) -> dict[str, bytes]:
    everything = [*optimizer.parameters, *optimizer.get_parameters()]
    return {param.name: param.asnumpy().tobytes() for param in everything}


def compare(world: World, name: str, kind: str) -> dict[str, object]:
    train, make = getattr(world, name), OPTIMIZERS[kind]
    native, losses, whole = train(make, lambda optimizer: optimizer)
    other, other_losses, other_whole = train(make, swapped)
    expected = serial(make, world.size if name != "tensor_parallel" else 1)
    report = other.swap_report()
    return {
        "wrapped": is_swap_optimizer(other) and not is_swap_optimizer(native),
        "losses": losses == other_losses,
        "bits": bits_of(other) == bits_of(native),
        "whole": all(np.array_equal(a, b) for a, b in zip(whole, other_whole, strict=True)),
        "serial": all(np.allclose(a, b, atol=1e-5) for a, b in zip(whole, expected, strict=True)),
        "idle": report.idle_device_bytes,
        "host": report.host_bytes,
    }


def main(folder: str, kind: str) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE, runtime_num_threads=1)
    world = World()
    names = ("data_parallel", "zero", "tensor_parallel")
    found = {name: compare(world, name, kind) for name in names}
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
