# SPDX-License-Identifier: Apache-2.0
"""Ranks that are forked: what they return, and how they fail."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from swap_testkit.torch.launch import RankFailedError, launch


def sum_of_ranks(start: int) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + start)])
    dist.all_reduce(total)
    return dist.get_rank(), torch.get_num_threads(), total.item()


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("planted on rank 1")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()


def sleep_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def environment() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_results_come_back_by_rank_from_single_threaded_processes(nproc: int) -> None:
    total = float(sum(range(nproc)) + 10 * nproc)
    assert launch(sum_of_ranks, 10, nproc=nproc) == [(r, 1, total) for r in range(nproc)]


def test_ranks_have_the_variables_of_torchrun() -> None:
    assert launch(environment, nproc=2) == [("0", "0", "2"), ("1", "1", "2")]


def test_a_failing_rank_ends_the_job_with_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="planted on rank 1") as failure:
        launch(raise_on_one, nproc=2, timeout=60)
    assert "rank 1:" in str(failure.value)
    assert "in raise_on_one" in str(failure.value)
    assert time.monotonic() - started < 30


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankFailedError, match="died with exit code 9"):
        launch(die_on_one, nproc=2, timeout=60)


def test_a_rank_that_hangs_is_killed_after_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"ranks \[1\] did not end in time and were killed"):
        launch(sleep_on_one, nproc=2, timeout=5)
    assert time.monotonic() - started < 30
