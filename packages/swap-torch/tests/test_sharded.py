# SPDX-License-Identifier: Apache-2.0
"""DTensor parameters, on one process and on two.

Adam runs on local shards; native runs through the DTensor's own dispatch. The bits agree, and what
``optimizer.state`` shows are DTensors, as natively, around host memory.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

SHARD, REPLICATE, PARTIAL = Shard(0), Replicate(), Partial()
PLACED: list[tuple[tuple[int, ...], Placement | None]] = [
    ((6, 50), SHARD),
    ((40,), None),
    ((7, 33), SHARD),
    ((128,), REPLICATE),
    ((1, 20), SHARD),  # on two processes, one of them has no row
    ((3, 5), None),
    ((9, 16), Shard(1)),
]
"""Shapes and placements of the parameters of one group; None: a plain tensor."""
DTENSORS = [(shape, placed) for shape, placed in PLACED if placed is not None]
KINDS = ["same placement", "replicated", "partial"]
Make: TypeAlias = Callable[[Any], torch.optim.Optimizer]
Placed: TypeAlias = Sequence[tuple[tuple[int, ...], Placement | None]]


class Case(NamedTuple):
    """What is trained with what."""

    make: Make = partial(torch.optim.AdamW, amsgrad=True)
    placed: Placed = PLACED
    foreach: bool = False


def fused_and_coupled(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Adam with the fused kernel: torch lets groups of an AdamW choose."""
    group = {"params": params, "decoupled_weight_decay": False}
    return torch.optim.AdamW([group], fused=True, **options)


COUPLED = partial(torch.optim.Adam, weight_decay=0.1)
CASES = {
    "AdamW": Case(),
    "AdamW-fused": Case(partial(torch.optim.AdamW, fused=True), DTENSORS),
    "AdamW-fused-coupled": Case(partial(fused_and_coupled, weight_decay=0.1), DTENSORS),
    "AdamW-maximize": Case(partial(torch.optim.AdamW, maximize=True)),
    "Adam": Case(COUPLED),
    "Adam-maximize": Case(partial(COUPLED, maximize=True)),
    "Adam-foreach": Case(COUPLED, DTENSORS, foreach=True),
    # Natively an error for shards: torch cannot add one to a part in place.
    "Adam-foreach-maximize": Case(
        partial(COUPLED, maximize=True), [((128,), REPLICATE)], foreach=True
    ),
}


@contextmanager
def foreach_on_cpu(wanted: bool) -> Iterator[None]:
    """Make foreach=None mean foreach on the CPU, as it does on accelerators."""
    module = sys.modules["torch.optim.optimizer"]
    name = "_get_foreach_kernels_supported_devices"
    with mock.patch.object(module, name, return_value=["cpu"]) if wanted else nullcontext():
        yield


class Pair:
    """A native and a swapped optimizer over sharded and plain parameters."""

    def __init__(
        self, mesh: DeviceMesh, *, packed: bool, wrap_after: int = 0, case: Case = CASES["AdamW"]
    ) -> None:
        self.mesh = mesh
        self.placed = case.placed
        self.device = CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
        self.native, self.swapped = (case.make(self._parameters()) for _ in range(2))
        for step in range(wrap_after):
            self.step(step, "same placement")
        config = SwapOptimizerConfig(swap_times=3, min_numel=0, packed_swap=packed)
        swap_optimizer(self.swapped, config, device=self.device)

    def _parameters(self) -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        return [
            torch.nn.Parameter(
                value if placed is None else distribute_tensor(value, self.mesh, [placed])
            )
            for value, placed in ((torch.randn(shape), placed) for shape, placed in self.placed)
        ]

    def step(self, number: int, kind: str) -> None:
        """Step both with the same gradients of a kind, the same values in every process."""
        for optimizer in (self.native, self.swapped):
            torch.manual_seed(1 + number)
            for param, (shape, placed) in zip(
                optimizer.param_groups[0]["params"], self.placed, strict=True
            ):
                param.grad = self._gradient(torch.randn(shape), placed, kind)
            optimizer.step()

    def _gradient(self, value: torch.Tensor, placed: Placement | None, kind: str) -> torch.Tensor:
        if placed is None:
            return value
        if value.shape[0] < self.mesh.size():
            kind = "same placement"  # native refuses others where a process has no row
        if kind == "partial":
            # The sum over processes is the gradient; distribute_tensor does not make such tensors.
            part = 0.3 if self.mesh.get_rank() else 0.7
            return DTensor.from_local(value * part, self.mesh, [PARTIAL], run_check=False)
        return distribute_tensor(value, self.mesh, [REPLICATE if kind == "replicated" else placed])

    def check(self) -> None:
        """Same bits, the same kinds of tensor, and memory of the host."""
        assert_same_bits(self.native, self.swapped)
        assert self.device.held_bytes == 0
        for (param, native), shown in zip(
            self.native.state.items(), self.swapped.state.values(), strict=True
        ):
            for key, one in native.items():
                other = shown[key]
                assert type(other) is type(one)
                if isinstance(one, DTensor):
                    assert other.placements == one.placements == param.placements
                    assert other.device_mesh == one.device_mesh
                    assert torch.equal(other.full_tensor(), one.full_tensor())
                    local = other.to_local()
                    assert local.storage_offset() == other.storage_offset() == 0
                    assert local.untyped_storage().nbytes() == local.nbytes

    def host_ranges(self) -> list[tuple[int, int]]:
        """Addresses of the host memory."""
        pools = self.swapped._swap._table.homes._pools.values()  # type: ignore[attr-defined]
        blocks = [block for pool in pools for block in pool._segments.values()]
        return [(block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


both_layouts = pytest.mark.parametrize("packed", [True, False])


@both_layouts
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_one_process(kind: str, packed: bool, mesh: DeviceMesh) -> None:
    pair = Pair(mesh, packed=packed)
    for number in range(3):
        pair.step(number, kind)
        pair.check()
    plans = pair.swapped.swap_report().ledger.plans_built  # type: ignore[attr-defined]
    assert plans == 1


@both_layouts
def test_placements_that_change_need_no_new_plan(packed: bool, mesh: DeviceMesh) -> None:
    pair = Pair(mesh, packed=packed)
    for number in range(6):
        pair.step(number, KINDS[number % 3])
    pair.check()
    report = pair.swapped.swap_report()  # type: ignore[attr-defined]
    assert report.ledger.plans_built == 1


@both_layouts
@pytest.mark.parametrize("wrap_after", [0, 2])
def test_states_are_in_host_memory(wrap_after: int, packed: bool, mesh: DeviceMesh) -> None:
    pair = Pair(mesh, packed=packed, wrap_after=wrap_after)
    if not wrap_after:
        pair.step(0, "same placement")
    pair.check()
    ranges = pair.host_ranges()
    for entry in pair.swapped.state.values():
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            local = entry[key].to_local() if isinstance(entry[key], DTensor) else entry[key]
            assert any(start <= local.data_ptr() < end for start, end in ranges)
        assert not isinstance(entry["step"], DTensor)


@both_layouts
def test_saved_and_copied_states_have_their_own_size(packed: bool, mesh: DeviceMesh) -> None:
    pair = Pair(mesh, packed=packed)
    pair.step(0, "same placement")
    sizes = []
    for optimizer in (pair.native, pair.swapped):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(file.tell())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        copied = copy.deepcopy(optimizer.state_dict())
        for other in (loaded, copied):
            assert_equal_states(other["state"], pair.native.state_dict()["state"])
    assert sizes[1] <= sizes[0] + 64


def assert_equal_states(found: dict[int, Any], expected: dict[int, Any]) -> None:
    for index, entry in expected.items():
        for key, value in entry.items():
            other = found[index][key]
            assert type(other) is type(value)
            if isinstance(value, DTensor):
                assert other.placements == value.placements
                value, other = value.to_local(), other.to_local()
                assert other.untyped_storage().nbytes() == other.nbytes
            assert torch.equal(value, other)


@both_layouts
def test_a_shard_that_is_replaced_is_noticed(packed: bool, mesh: DeviceMesh) -> None:
    """Some frameworks put other local tensors into parameters between steps."""
    pair = Pair(mesh, packed=packed)
    for number in range(3):
        for optimizer in (pair.native, pair.swapped):
            param = optimizer.param_groups[0]["params"][0]
            param._local_tensor = param._local_tensor.clone()
        pair.step(number, "same placement")
        pair.check()


# Two processes: this file, run as a program, forks them.


def two_processes() -> int:
    """Run the ranks; tell how many of them failed."""
    torch.set_num_threads(1)  # a child would wait for threads that only its parent has
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step()  # imports much
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=60)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return sum(process.exitcode != 0 for process in ranks)


def run_rank(rank: int, folder: str) -> None:
    """All kinds of gradient, packed and per tensor."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for (name, case), packed in product(CASES.items(), (True, False)):
        with foreach_on_cpu(case.foreach):
            pair = Pair(mesh, packed=packed, case=case)
            for number, kind in enumerate(KINDS):
                pair.step(number, kind)
                pair.check()
        rows = [param.to_local().shape[0] for param in sharded(pair.swapped)]
        assert rows == ([3, 4, 1] if rank == 0 else [3, 3, 0])[: len(rows)]
        print(f"rank {rank} agrees, {name}, {packed=}", flush=True)
    dist.destroy_process_group()


def sharded(optimizer: torch.optim.Optimizer) -> list[Any]:
    params = optimizer.param_groups[0]["params"]
    return [p for p in params if isinstance(p, DTensor) and p.placements == (SHARD,)]


def test_bits_of_two_processes() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("agrees") == 2 * 2 * len(CASES)


if __name__ == "__main__":
    sys.exit(two_processes())
