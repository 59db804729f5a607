# SPDX-License-Identifier: Apache-2.0
"""Faults, as changes of the source of the methods that have to be right.

As in a patch, lines with ``-`` are replaced by the lines with ``+`` that follow, if any. Where both
pipelines can have a fault, it is planted in both.
"""

from __future__ import annotations

import inspect
import sys
from textwrap import dedent
from typing import Any, TypeAlias

import pytest

from swap_core import PackedPipeline, PerTensorPipeline
from swap_core.moves import Moves
from swap_torch.adam import TorchNativeAdamWAdapter
from swap_torch.runner import Runner

OWNERS = {
    "Moves": Moves,
    "PackedPipeline": PackedPipeline,
    "PerTensorPipeline": PerTensorPipeline,
    "AdamW": TorchNativeAdamWAdapter,
    "Runner": Runner,
}

FAULTS = {
    "nothing": "",
    # Waits that are missing.
    "load does not wait for memory": """
        PackedPipeline._open
        - device.wait(device.load_stream, batches[0].restored)
        PerTensorPipeline._fetch
        - self.device.wait(self.device.load_stream, batch.restored)
    """,
    "update does not wait for its load": """
        Moves.await_load
        - self.device.wait(compute, batch.loaded)
    """,
    "update waits for another load": """
        PackedPipeline._pass
        - self._moves.await_load(compute, batch)
        + self.device.wait(compute, batches[0].loaded)
        PerTensorPipeline._pass
        - self._moves.await_load(compute, batch)
        + self.device.wait(compute, batches[0].loaded)
    """,
    "store does not wait for its update": """
        Moves.store
        - self.device.wait(store, batch.updated)
    """,
    "load does not wait for the arena": """
        PackedPipeline._pass
        - self.device.wait(self.device.load_stream, batch.stored)
    """,
    "release does not wait for a store": """
        PackedPipeline._close
        - self.device.wait(compute, waited[-1].stored)
        PerTensorPipeline._retire
        - self.device.wait(compute, batch.stored)
    """,
    "last release waits for no store": """
        PackedPipeline._close
        - give_back = self._moves.release_behind_stores if number in left else self._moves.release
        + give_back = self._moves.release
        PerTensorPipeline._close
        - self._moves.release_behind_stores(last.memory, last.nbytes)
        + self._moves.release(last.memory, last.nbytes)
    """,
    "host does not wait for stores": """
        Runner.settle
        - device.synchronize(event)
    """,
    # Events that are not recorded, or before what they are to mark.
    "memory is not recorded": """
        PackedPipeline._open
        - device.record(batches[0].restored, compute)
        PerTensorPipeline._fetch
        - self.device.record(batch.restored, compute)
    """,
    "load is not recorded": """
        Moves.load
        - self.device.record(batch.loaded, load)
    """,
    "load is recorded too early": """
        Moves.load
        - self.device.copy_in(load, batch.transfers)
        - self.device.record(batch.loaded, load)
        + self.device.record(batch.loaded, load)
        + self.device.copy_in(load, batch.transfers)
    """,
    "update is not recorded": """
        Moves.update
        - self.device.record(batch.updated, compute)
    """,
    "update is recorded too early": """
        Moves.update
        - update(batch.index)
        - self.device.record(batch.updated, compute)
        + self.device.record(batch.updated, compute)
        + update(batch.index)
    """,
    "store is not recorded": """
        Moves.store
        - self.device.record(batch.stored, store)
    """,
    "store is recorded too early": """
        Moves.store
        - self.device.copy_out(store, batch.transfers)
        - self.device.record(batch.stored, store)
        + self.device.record(batch.stored, store)
        + self.device.copy_out(store, batch.transfers)
    """,
    # The wrong order of the host's own calls.
    "memory is released before the wait": """
        PackedPipeline._close
        - self.device.wait(compute, waited[-1].stored)
        + pass
        - for batch in stored:
        + if waited:
        +     self.device.wait(compute, waited[-1].stored)
        + for batch in stored:
        PerTensorPipeline._retire
        - self.device.wait(compute, batch.stored)
        - self._give_back(batch)
        + self._give_back(batch)
        + self.device.wait(compute, batch.stored)
    """,
    "memory is released before a store": """
        Moves.store
        - self.device.copy_out(store, batch.transfers)
        + self.device.release(batch.memory)
        + self.device.copy_out(store, batch.transfers)
    """,
    "next load comes before the store": """
        PackedPipeline._pass
        - self._moves.store(batch)
        - following = passage.position - 1 + len(self._arenas)
        + following = passage.position - 1 + len(self._arenas)
        + if following < len(batches):
        +     self._moves.load(batches[following])
        + self._moves.store(batch)
        - self._moves.load(batches[following])
    """,
    "store is queued before its update": """
        PackedPipeline._pass
        - self._moves.update(compute, batch, update)
        + batch.to_device()
        + self._moves.store(batch)
        + update(batch.index)
        + self.device.record(batch.updated, compute)
        - self._moves.store(batch)
        PerTensorPipeline._pass
        - self._moves.update(compute, batch, update)
        + batch.to_device()
        + self._moves.store(batch)
        + update(batch.index)
        + self.device.record(batch.updated, compute)
        - self._moves.store(batch)
    """,
    "batch is stored and never updated": """
        PackedPipeline._pass
        - self._moves.update(compute, batch, update)
        PerTensorPipeline._pass
        - self._moves.update(compute, batch, update)
    """,
    # Memory and copies.
    "memory is not taken": """
        Moves.restore
        - restore_or_explain(self.device, memory, f"{what} ({nbytes:,} bytes)")
    """,
    "memory is not given back": """
        Moves.release
        - self.device.release(memory)
        Moves.release_behind_stores
        - self.device.release_behind(memory, self.device.store_stream)
    """,
    "memory of all batches at once": """
        PerTensorPipeline._pass
        - self._retire(compute, batches[place - 1])
        PerTensorPipeline._close
        - last = passage.order[-1]
        + for batch in passage.order[:-1]:
        +     self._retire(compute, batch)
        + last = passage.order[-1]
    """,
    "nothing is loaded": """
        Moves.load
        - self.device.copy_in(load, batch.transfers)
    """,
    "nothing is stored": """
        Moves.store
        - self.device.copy_out(store, batch.transfers)
    """,
    "everything is loaded twice": """
        Moves.load
        - self.device.copy_in(load, batch.transfers)
        + self.device.copy_in(load, batch.transfers)
        + self.device.copy_in(load, batch.transfers)
    """,
    # Right, but slow.
    "host waits for each store": """
        Moves.store
        - self.device.record(batch.stored, store)
        + self.device.record(batch.stored, store)
        + self.device.synchronize(batch.stored)
    """,
    "next update waits for each store": """
        PackedPipeline._pass
        - self._moves.store(batch)
        + self._moves.store(batch)
        + self.device.wait(compute, batch.stored)
        PerTensorPipeline._pass
        - self._moves.store(batch)
        + self._moves.store(batch)
        + self.device.wait(compute, batch.stored)
    """,
    "store is queued on the load stream": """
        Moves.store
        - store = self.device.store_stream
        + store = self.device.load_stream
    """,
    # Arithmetic.
    "counter advances twice": """
        AdamW.step_batch
        - self.update(group, call, call.gradients_in(step))
        + self.update(group, call, call.gradients_in(step))
        + [counter.add_(1) for counter in call.states["step"]]
    """,
    "one ulp of one parameter": """
        AdamW.step_batch
        - self.update(group, call, call.gradients_in(step))
        + self.update(group, call, call.gradients_in(step))
        + last = call.params[0].view(-1)[-1:]
        + last.copy_(torch.nextafter(last, torch.full_like(last, 9.0)))
    """,
    "another implementation": """
        AdamW.kernel
        - fused, foreach = group["fused"], group["foreach"]
        + fused, foreach = True, False
    """,
}

Hunk: TypeAlias = tuple[list[str], list[str]]
"""Lines that follow each other, and those in their place."""


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Replace the methods that ``fault`` names by changed copies, for the rest of a test."""
    for name, hunks in _parse(FAULTS[fault]).items():
        owner, method = name.split(".")
        function = getattr(OWNERS[owner], method)
        source = _changed(dedent(inspect.getsource(function)).split("\n"), hunks, name)
        namespace: dict[str, Any] = dict(vars(sys.modules[function.__module__]))
        exec(compile(source, f"<{name}: {fault}>", "exec"), namespace)
        monkeypatch.setattr(OWNERS[owner], method, namespace[method])


def _parse(patch: str) -> dict[str, list[Hunk]]:
    methods: dict[str, list[Hunk]] = {}
    for line in dedent(patch).strip().splitlines():
        hunks = methods[next(reversed(methods))] if methods else []
        if line.startswith("- "):
            if not hunks or hunks[-1][1]:
                hunks.append(([], []))
            hunks[-1][0].append(line[2:])
        elif line.startswith("+ "):
            hunks[-1][1].append(line[2:])
        else:
            methods[line] = []
    return methods


def _changed(lines: list[str], hunks: list[Hunk], name: str) -> str:
    start = 0
    for old, new in hunks:
        bare = [line.strip() for line in lines]
        found = [i for i in range(start, len(lines)) if bare[i : i + len(old)] == old]
        assert len(found) == 1, f"{name} has {old} {len(found)} times; bring planted.py up to date"
        margin = lines[found[0]][: -len(bare[found[0]])]
        start = found[0] + len(new or ["pass"])
        lines[found[0] : found[0] + len(old)] = [margin + line for line in new or ["pass"]]
    return "\n".join(lines)
