# SPDX-License-Identifier: Apache-2.0
"""Each trainer, native and swapped: the same bits, uninterrupted and resumed."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swap_testkit.torch import assert_same_bits, launch
from swap_torch import is_swap_optimizer
from swap_torch.sharding import local_of

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples; also in the processes below

# Trainers warn of much; what this library says is an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*swap_optimizer"),
]

TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate": ("accelerate_train", {}),
    "transformers": ("transformers_train", {}),
    "lightning": ("lightning_train", {}),
    "lightning, manual": ("lightning_train", {"manual": True}),
    "torch.distributed.checkpoint": ("dcp_train", {}),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_same_bits_also_when_resumed_and_from_each_other(trainer: str, tmp_path: Path) -> None:
    name, options = TRAINERS[trainer]
    train = importlib.import_module(name).train
    native, swapped = (
        train(tmp_path / kind, swap=kind == "swapped", **options)[1]
        for kind in ("native", "swapped")
    )
    assert is_swap_optimizer(swapped)
    assert not is_swap_optimizer(native)
    assert_same_bits(native, swapped)
    report = swapped.swap_report()
    assert report.ledger.updates > 2
    for written in ("native", "swapped"):
        for kind in ("native", "swapped"):
            resumed = train(tmp_path / written, swap=kind == "swapped", resume=True, **options)[1]
            assert is_swap_optimizer(resumed) == (kind == "swapped")
            assert_same_bits(native, resumed)


# On two processes.


def job_dcp(folder: str) -> None:
    """FSDP2, through torch.distributed.checkpoint."""
    train = importlib.import_module("dcp_train").train
    results = [train(Path(folder, "0"), swap=False), train(Path(folder, "1"), swap=True)]
    results += [train(Path(folder, "0"), swap=True, resume=True)]
    results += [train(Path(folder, "1"), swap=False, resume=True)]
    for _, optimizer in results[1:]:
        assert_same_bits(results[0][1], optimizer)


def test_dcp_on_two_processes(tmp_path: Path) -> None:
    launch(job_dcp, str(tmp_path), nproc=2)


def job_accelerate(folder: str, swap: bool, resume: bool) -> list[str]:
    """Accelerate's FSDP2 plugin, which it enables for accelerators only: so the CPU poses as one.

    It replaces the optimizer's parameters by sharded ones after they were wrapped.
    """
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    accelerate = importlib.import_module("accelerate")
    accelerate.PartialState(cpu=True)
    shared = accelerate.PartialState._shared_state
    shared["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    train = importlib.import_module("accelerate_train").train
    model, optimizer = train(Path(folder), swap=swap, resume=resume, fsdp=True)
    assert is_swap_optimizer(optimizer) == swap
    tensors = list(model.parameters())
    assert all(local_of(tensor).shape != tensor.shape for tensor in tensors)
    tensors += [value for p in tensors for value in optimizer.state[p].values()]
    return [local_of(tensor).detach().numpy().tobytes().hex() for tensor in tensors]


def test_accelerate_fsdp2_on_two_processes(tmp_path: Path) -> None:
    native, swapped = str(tmp_path / "native"), str(tmp_path / "swapped")
    expected = launch(job_accelerate, native, False, False, nproc=2)
    assert launch(job_accelerate, swapped, True, False, nproc=2) == expected
    assert launch(job_accelerate, native, True, True, nproc=2) == expected
    assert launch(job_accelerate, swapped, False, True, nproc=2) == expected
