# SPDX-License-Identifier: Apache-2.0
"""Collectives, DTensor and FSDP2 on one and two processes, and the ready-made scenarios."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import randn as randn_sharded

from swap_core import SwapOptimizerConfig
from swap_testkit import cli
from swap_testkit.torch import RankFailedError, launch, simulator
from swap_testkit.torch.run import align_scenario
from swap_testkit.torch.simulator import Schedule
from swap_testkit.torch.simulator.process_group import BACKEND, SimulatedGroup
from swap_testkit.torch.simulator.role import check_races

DEVICE = "simnpu"
CONFIGS = [
    SwapOptimizerConfig(swap_times=3, min_numel=16, packed_swap=packed) for packed in (True, False)
]


def here() -> torch.device:
    return torch.device(DEVICE, dist.get_rank())


def collectives() -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((4,), float(rank + 1), device=here())
    dist.all_reduce(mine)
    assert mine.tolist() == [sum(range(1, world + 1))] * 4
    gathered = torch.empty(world, device=here())
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)], device=here()))
    assert gathered.tolist() == list(range(world))
    parts = [torch.empty(1, device=here()) for _ in range(world)]
    dist.all_gather(parts, torch.tensor([float(rank)], device=here()))
    assert [part.item() for part in parts] == list(range(world))
    part = torch.empty(1, device=here())
    dist.reduce_scatter_tensor(part, torch.arange(float(world), device=here()))
    assert part.item() == rank * world
    dist.broadcast(mine, 0)
    exchanged = torch.empty(world, device=here())
    dist.all_to_all_single(exchanged, torch.full((world,), float(rank), device=here()))
    assert exchanged.tolist() == list(range(world))
    root = rank == 0
    dist.gather(part, [torch.empty(1, device=here()) for _ in range(world)] if root else None)
    dist.scatter(part, list(gathered.split(1)) if root else None)
    assert part.item() == rank
    dist.reduce(part, 0)
    if world > 1:
        send_and_receive(rank, world)
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu)
    assert on_cpu.tolist() == [world] * 2
    dist.barrier()
    assert simulator.races() == []
    return str(dist.get_backend(dist.group.WORLD))


def send_and_receive(rank: int, world: int) -> None:
    got = torch.empty(2, device=here())
    operations = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank), device=here()), (rank + 1) % world),
        dist.P2POp(dist.irecv, got, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == [float((rank - 1) % world)] * 2


@pytest.mark.parametrize("nproc", [1, 2])
def test_collectives(nproc: int) -> None:
    assert all(BACKEND in name for name in launch(collectives, nproc=nproc, device="sim"))


def a_shorter_timeout() -> None:
    """Trainers set one after the first step; torch asks the backend of the CPU for that."""
    group = dist.new_group(backend=BACKEND)
    assert type(group) is SimulatedGroup
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    group.set_timeout(timedelta(seconds=1))  # torch 2.14 calls this
    for device in (here(), torch.device("cpu")):
        assert not group._get_backend(device).supports_coalescing
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.ones(1, device=device), group=group)
    dist.barrier()


def test_timeouts_can_be_changed() -> None:
    launch(a_shorter_timeout, nproc=2, device="sim")


def a_wait_that_is_missing() -> list[str]:
    values = torch.ones(4, device=here())
    work = dist.all_reduce(values, async_op=True)
    values.add_(1)
    found = [f"{race.earlier}, {race.operation}" for race in simulator.races()]
    work.wait()
    values.add_(1)
    assert simulator.races() == []
    return found


def test_a_collective_is_on_a_stream_of_its_own() -> None:
    assert launch(a_wait_that_is_missing, nproc=2, device="sim") == [["all_reduce, add"]] * 2


def sharded() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (world,))
    base = torch.arange(32.0, device=here()).view(8, 4)
    ones = distribute_tensor(torch.ones(4, 2, device=here()), mesh, [Replicate()])
    product = distribute_tensor(base, mesh, [Shard(0)]) @ ones
    assert torch.equal(product.full_tensor(), base @ torch.ones(4, 2, device=here()))
    assert product.to_local().device == here()
    torch.manual_seed(3)
    drawn = randn_sharded(8, 4, device_mesh=mesh, placements=[Shard(0)])
    assert drawn.full_tensor().unique().numel() == 32
    for schedule in (Schedule.EARLIEST, Schedule.LATEST, Schedule.SIDE_STREAMS_FIRST):
        simulator.set_schedule(schedule)
        for ours, theirs in zip(train(mesh), train(None), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert simulator.races() == []


def train(mesh: DeviceMesh | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    if mesh is not None:
        model.to(here())
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        batch = torch.randn(8, 16, generator=generator)
        model(batch if mesh is None else batch.to(here())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    params = [param.detach() for param in model.parameters()]
    return [p.full_tensor().cpu() if isinstance(p, DTensor) else p for p in params]


@pytest.mark.parametrize("nproc", [1, 2])
def test_dtensor_and_fsdp2(nproc: int) -> None:
    launch(sharded, nproc=nproc, device="sim")


@pytest.mark.parametrize(
    ("scenario", "nproc"),
    [
        ("recompute", 1),
        ("offload", 1),
        ("fsdp", 2),
        ("fsdp-fp16", 2),
        ("fsdp-recompute", 2),
        ("fsdp-offload", 2),
        ("hsdp", 4),
        ("tp", 2),
        ("tp-sp", 2),
        ("pp-1f1b", 2),
        ("muon-fsdp-uneven", 2),
        ("muon-tp", 2),
    ],
)
def test_a_scenario_is_aligned(scenario: str, nproc: int) -> None:
    for result in align_scenario(
        scenario,
        optimizers=["adamw"],
        nproc=nproc,
        configs=CONFIGS,
        steps=2,
        device="sim",
        timeout=180,
    ):
        assert result.aligned, result.explain()
        assert result.compared > 0
        assert result.swapped_memory.idle < result.native_memory.idle / 2


def with_a_race() -> None:
    side = torch.Stream(device=DEVICE)
    values = torch.zeros(4, device=here())
    with side:
        values.add_(1)
    check_races("sim", "this")


def test_races_fail_a_rank() -> None:
    with pytest.raises(RankFailedError, match="this has 1 races on the simulated accelerator"):
        launch(with_a_race, nproc=1, device="sim")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["align", "--scenario", "single", "--device", "sim", "--steps", "2", "--packed"]
    assert cli.main([*arguments, "--optimizer", "adamw-fused", "--min-numel", "16"]) == 0
    assert "single on 1" in capsys.readouterr().out


def test_processes_under_torchrun_end_cleanly() -> None:
    for _ in range(2):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node=2", "-m", "swap_testkit", "worker", "--scenario", "fsdp"),
                *("--device", "sim", "--steps", "2", "--optimizer", "adamw", "--packed"),
                *("--min-numel", "16"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
