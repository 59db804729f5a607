# SPDX-License-Identifier: Apache-2.0
"""Run a function on several processes of this machine, in tenths of a second.

Starting Python and importing torch takes seconds per process. So processes are forked from a server
(:mod:`multiprocessing`'s forkserver) that has imported what they need and never computes: a fork of
a process that has run a multi-threaded operation hangs in its first parallel region.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import TypeVar

from swap_testkit.reference import FunctionReference

__all__ = ["RankFailedError", "launch", "process_group"]

ResultT = TypeVar("ResultT")

_GRACE_SECONDS = 2.0
"""How long the other ranks may go on after one failed: they hang in a collective, or fail too."""

_PRELOADED = ["swap_testkit.torch.preload"]


class RankFailedError(RuntimeError):
    """A rank raised, died or took too long. The message has its traceback."""


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    results: Connection
    result: bytes | None = None


def launch(
    function: Callable[..., ResultT],
    *arguments: object,
    nproc: int,
    timeout: float = 120.0,
    device: str = "cpu",
) -> list[ResultT]:
    """Call ``function(*arguments)`` on ``nproc`` ranks with a process group.

    Each rank is a process with one thread. ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set, as
    under torchrun. Ranks find each other through a file, so no port is taken.

    Args:
        function: At the top level of a module.
        arguments: Picklable.
        nproc: Number of ranks.
        timeout: Seconds after which all ranks are killed.
        device: Type of device that the ranks train on; each takes the card of its number.

    Returns:
        The results, by rank.

    Raises:
        RankFailedError: a rank raised, died without a word, or did not end in time.
    """
    from swap_testkit.torch.simulator.role import prepare

    prepare(device)
    reference = FunctionReference.to(function)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="swap-testkit-") as folder:
        ranks = []
        for number in range(nproc):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, number, nproc, device, Path(folder), timeout, reference, arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours))
        try:
            _collect(ranks, monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.results.close()
    return [pickle.loads(rank.result or b"") for rank in ranks]


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Wait for every rank's result; on the first failure give the others a moment, then raise."""
    failures: dict[int, str] = {}
    waiting: dict[object, _Rank] = {rank.results: rank for rank in ranks}
    while waiting:
        ready = wait([rank.results for rank in waiting.values()], max(0.0, deadline - monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            failure = _receive(rank)
            if failure is not None:
                failures[rank.number] = failure
                deadline = min(deadline, monotonic() + _GRACE_SECONDS)
    if failures or waiting:
        late = sorted(rank.number for rank in waiting.values())
        told = [f"rank {number}:\n{text}" for number, text in sorted(failures.items())]
        if late:
            told.append(f"ranks {late} did not end in time and were killed")
        raise RankFailedError("\n".join(told))


def _receive(rank: _Rank) -> str | None:
    """Take a rank's result; return what went wrong instead, if anything."""
    try:
        ok, payload = rank.results.recv()
    except EOFError:
        rank.process.join(_GRACE_SECONDS)
        return f"died with exit code {rank.process.exitcode} and without a word"
    if ok:
        rank.result = payload
        return None
    return str(payload)


def _rank_main(
    results: Connection,
    rank: int,
    nproc: int,
    device: str,
    folder: Path,
    timeout: float,
    function: FunctionReference,
    arguments: tuple[object, ...],
) -> None:
    import torch

    # First of all: see the module's docstring.
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answer: tuple[bool, bytes | str]
    try:
        with process_group(device, f"file://{folder / 'rendezvous'}", timeout):
            answer = (True, pickle.dumps(function.find()(*arguments)))
    except BaseException:  # noqa: BLE001  # whatever it is, the parent must hear of it
        answer = (False, traceback.format_exc())
    results.send(answer)
    results.close()


@contextmanager
def process_group(device: str, init_method: str, timeout: float) -> Iterator[None]:
    """A default process group for a device type: its own collectives, and gloo for the CPU.

    Args:
        device: ``cpu``, ``cuda``, ``npu`` or another accelerator's type, or ``sim``.
        init_method: Where ranks meet: ``file://...`` or ``env://``.
        timeout: Seconds for a collective.
    """
    import torch
    import torch.distributed as dist

    from swap_testkit.torch.simulator.role import device_type

    backend = "gloo"
    device = device_type(device)
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
