# SPDX-License-Identifier: Apache-2.0
"""Collectives between simulated accelerators: gloo, on the memory of the devices.

As with nccl and hccl, a collective runs on a stream of its own that waits for the caller's stream,
and ``wait()`` makes the caller's stream wait for it. Physically it runs at once, in step with the
host; the checker is told of streams and waits only, so a ``wait()`` that is missing is found.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from swap_testkit.torch.simulator.control import enabled_name
from swap_testkit.torch.simulator.work import Result, SimulatedWork, Works

__all__ = ["BACKEND", "register_backend"]

BACKEND = "simccl"
"""Name of the backend."""

Tensors: TypeAlias = Sequence[torch.Tensor]
Gloo: TypeAlias = Any
"""A group of gloo; untyped, since its methods have other names in each version of torch."""
Options: TypeAlias = Any
"""What torch passes on to gloo."""

_groups: WeakSet[SimulatedGroup] = WeakSet()


_ProcessGroup: Any = dist.ProcessGroup
"""Untyped: its methods have overloads of which torch calls one, and other names in each version."""


def register_backend() -> None:
    """Let ``torch.distributed`` know the backend; the default one for simulated devices.

    Nothing to do twice.
    """
    name = enabled_name()
    if name is None:
        raise RuntimeError("simulator: not enabled; call simulator.enable() first.")
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _make_group, devices=[name, "cpu"])
    atexit.register(_let_go_of_gloo)


def _make_group(store: Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout)


@cache
def _gloo_device() -> Gloo:
    """What all groups of this process listen on, with one thread; gloo makes one for each."""
    return dist.ProcessGroupGloo.create_default_device()


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Gloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
    options._devices, options._timeout = [_gloo_device()], timeout
    # Whoever asks for a collective waits for it, so a second thread would have nothing to do.
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _let_go_of_gloo() -> None:
    """Join gloo's threads while the interpreter still runs.

    One that drops a tensor of Python later takes the lock of a dying interpreter, which aborts.
    """
    for group in list(_groups):
        group.shutdown()
    _gloo_device.cache_clear()


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]  # see there
    """A process group for tensors of simulated devices, and of the CPU."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # One for each kind of device, as `cpu:gloo,cuda:nccl` has: a thread that saves a checkpoint
        # works with CPU tensors while training goes on, in no common order on all ranks.
        self._gloo, self._cpu_gloo = (
            _gloo(PrefixStore(name, store), rank, size, timeout) for name in ("device", "cpu")
        )
        self._streams: dict[torch.device, torch.Stream] = {}
        self._rank, self._size, self._name = rank, size, ""
        _groups.add(self)

    def shutdown(self) -> None:
        """End the threads of gloo. ``destroy_process_group`` calls it.

        Without it they would live until Python's garbage collector finds the group, which device
        meshes refer to in cycles, and which trainers switch off.
        """
        self._name = self.pg_name
        self._gloo = self._cpu_gloo = None

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """The backend's name."""
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        """What it serves; asynchronous checkpoints ask whether the CPU is among them."""
        return [torch.device("cpu"), torch.device(str(enabled_name()))]

    def _get_backend(self, device: torch.device) -> Gloo:
        """What torch asks for features (2.14 in a pipeline), and sets timeouts through (2.13)."""
        return self._cpu_gloo if device.type == "cpu" else self._gloo

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a collective may take; trainers do after the first step."""
        for group in (self._gloo, self._cpu_gloo):
            group._set_default_timeout(timeout)

    @property
    def pg_name(self) -> str:
        """The name that torch gave this group."""
        # Kept, because torch asks for it once more after it has forgotten the group.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    @property
    def group_name(self) -> str:
        """The same."""
        return self.pg_name

    def rank(self) -> int:
        """Of this process."""
        return self._rank

    def size(self) -> int:
        """Number of processes."""
        return self._size

    # One for each shape of arguments. ``reads`` and ``writes`` are flat lists; ``call`` gets CPU
    # tensors in their order.

    def _run(
        self,
        name: str,
        reads: Tensors,
        writes: Tensors,
        call: Callable[[Gloo, list[torch.Tensor], list[torch.Tensor]], Any],
        result: Result,
    ) -> SimulatedWork:
        ours = next((tensor for tensor in [*reads, *writes] if tensor.device.type != "cpu"), None)
        if ours is None:
            call(self._cpu_gloo, list(reads), list(writes)).wait()
            return SimulatedWork(result, None, None)
        stream = self._stream(ours.device)
        stream.wait_stream(torch.accelerator.current_stream(ours.device))
        event = torch.Event(device=ours.device)
        with stream:
            views = torch.ops.swap_simulator.begin_collective(list(reads), list(writes), name)
            call(self._gloo, views[: len(reads)], views[len(reads) :]).wait()
            event.record(stream)
        return SimulatedWork(result, event, (reads, writes))

    def _gloo_for(self, tensors: Tensors) -> Gloo:
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        return self._cpu_gloo if on_cpu else self._gloo

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        return self._streams[device]

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Options = None) -> SimulatedWork:
        """Reduce in place."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        args = () if opts is None else (opts,)
        return self._run(
            "all_reduce", [], tensors, lambda gloo, _, w: gloo.allreduce(w, *args), tensors
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Options) -> SimulatedWork:
        """Reduce several in place."""
        return self._run(
            "all_reduce", [], tensors, lambda gloo, _, w: gloo.allreduce_coalesced(w, opts), tensors
        )

    def broadcast(self, tensors: Tensors, opts: Options) -> SimulatedWork:
        """Read on the root, written elsewhere."""
        return self._run(
            "broadcast", [], tensors, lambda gloo, _, w: gloo.broadcast(w, opts), tensors
        )

    def reduce(self, tensors: Tensors, opts: Options) -> SimulatedWork:
        """Written on the root; elsewhere gloo may use the memory for partial results."""
        return self._run("reduce", [], tensors, lambda gloo, _, w: gloo.reduce(w, opts), tensors)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options = None
    ) -> SimulatedWork:
        """Gather into lists of tensors."""
        args = () if opts is None else (opts,)
        return self._run(
            "all_gather",
            inputs,
            [tensor for output in outputs for tensor in output],
            lambda gloo, r, w: gloo.allgather(_as(outputs, w), r, *args),
            outputs,
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> SimulatedWork:
        """Gather on the root."""
        return self._run(
            "gather",
            inputs,
            [tensor for output in outputs for tensor in output],
            lambda gloo, r, w: gloo.gather(_as(outputs, w), r, opts),
            outputs,
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> SimulatedWork:
        """Scatter from the root."""
        return self._run(
            "scatter",
            [tensor for each in inputs for tensor in each],
            outputs,
            lambda gloo, r, w: gloo.scatter(w, _as(inputs, r), opts),
            outputs,
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options
    ) -> SimulatedWork:
        """Reduce lists of tensors."""
        return self._run(
            "reduce_scatter",
            [tensor for each in inputs for tensor in each],
            outputs,
            lambda gloo, r, w: gloo.reduce_scatter(w, _as(inputs, r), opts),
            outputs,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options) -> SimulatedWork:
        """Exchange lists of tensors, by sending and receiving: gloo has no such collective."""
        del opts

        def exchange(gloo: Gloo, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Works:
            writes[self._rank].copy_(reads[self._rank])
            others = [peer for peer in range(self._size) if peer != self._rank]
            return Works(
                [gloo.send([reads[peer].contiguous()], peer, self._rank) for peer in others]
                + [gloo.recv([writes[peer]], peer, peer) for peer in others]
            )

        return self._run("all_to_all", inputs, outputs, exchange, outputs)

    def barrier(self, opts: Options = None) -> SimulatedWork:
        """Meet; what is queued on devices is not waited for."""
        self._cpu_gloo.barrier(*(() if opts is None else (opts,))).wait()
        return SimulatedWork(None, None, None)

    # Between two processes. gloo sends only when the other side receives, so nobody waits here:
    # what is sent is set aside, and what is received is moved to the device by ``wait()``.

    def send(self, tensors: Tensors, peer: int, tag: int) -> SimulatedWork:
        """Send to another process."""
        staged: list[torch.Tensor] = []

        def set_aside(_: Gloo, reads: list[torch.Tensor], __: list[torch.Tensor]) -> Works:
            staged.extend(tensor.clone() for tensor in reads)
            return Works([])

        work = self._run("send", tensors, [], set_aside, tensors)
        work.unfinished = [self._gloo_for(tensors).send(staged, peer, tag)]
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> SimulatedWork:
        """Receive from another process."""
        staged = [torch.empty_like(tensor, device="cpu") for tensor in tensors]

        def move(_: Gloo, __: list[torch.Tensor], writes: list[torch.Tensor]) -> Works:
            for write, received in zip(writes, staged, strict=True):
                write.copy_(received)
            return Works([])

        def finish() -> SimulatedWork:
            return self._run("recv", [], tensors, move, tensors)

        work = SimulatedWork(tensors, None, tensors, finish)
        work.unfinished = [self._gloo_for(tensors).recv(staged, peer, tag)]
        return work

    # Between one tensor and one tensor. torch 2.13 has other names for them than 2.10.

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Options = None
    ) -> SimulatedWork:
        return self._pair("all_gather", "_allgather_base", output, input, opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Options = None
    ) -> SimulatedWork:
        return self._pair("reduce_scatter", "_reduce_scatter_base", output, input, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Options = None,
    ) -> SimulatedWork:
        """Exchange parts of a tensor."""
        args = () if opts is None else (opts,)
        return self._run(
            "all_to_all",
            [input],
            [output],
            lambda gloo, r, w: gloo.alltoall_base(w[0], r[0], output_splits, input_splits, *args),
            output,
        )

    def _pair(
        self, name: str, method: str, output: torch.Tensor, input: torch.Tensor, opts: Options
    ) -> SimulatedWork:
        args = () if opts is None else (opts,)
        return self._run(
            name,
            [input],
            [output],
            lambda gloo, r, w: getattr(gloo, method)(w[0], r[0], *args),
            output,
        )

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options = None
    ) -> SimulatedWork:
        """Gather several, one after the other."""
        return self._each(self._allgather_base, outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options = None
    ) -> SimulatedWork:
        """Reduce several, one after the other."""
        return self._each(self._reduce_scatter_base, outputs, inputs, opts)

    def _each(
        self, one: Callable[..., SimulatedWork], outputs: Tensors, inputs: Tensors, opts: Options
    ) -> SimulatedWork:
        last: SimulatedWork | None = None
        for output, input in zip(outputs, inputs, strict=True):
            last = one(output, input, opts)
        # The stream is in order: the last event covers all.
        return SimulatedWork(outputs, None if last is None else last.event, (outputs, inputs))

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _as(lists: Sequence[Tensors], flat: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut a flat list like ``lists``."""
    views = iter(flat)
    return [[next(views) for _ in each] for each in lists]
