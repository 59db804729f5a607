# SPDX-License-Identifier: Apache-2.0
"""Fixtures that share code: under importlib mode test modules cannot import each other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

from swap_core import (
    Batch,
    Ledger,
    PackedPipeline,
    PerTensorPipeline,
    VirtualDevice,
    VirtualEvent,
    VirtualMemory,
)

VirtualBatch: TypeAlias = Batch[VirtualEvent, VirtualMemory, int]


@pytest.fixture(scope="session")
def recording() -> ModuleType:
    """The module ``recording.py`` beside this file."""
    name = "swap_core_tests_recording"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("recording.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_virtual() -> Callable[..., tuple[list[VirtualBatch], float]]:
    """Run one update on a :class:`VirtualDevice`; a batch is one transfer.

    Gives the batches, and when the work that needs no swapped state was done.
    """

    def run(
        device: VirtualDevice,
        kind: str,
        sizes: Sequence[int],
        *,
        arenas: int = 2,
        update: Callable[[int], None] = lambda index: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[list[VirtualBatch], float]:
        ring = [VirtualMemory(max(sizes[i::arenas], default=0)) for i in range(arenas)]
        batches: list[VirtualBatch] = [
            Batch(
                index=index,
                nbytes=nbytes,
                memory=ring[index % arenas] if kind == "packed" else VirtualMemory(nbytes),
                transfers=(nbytes,),
                restored=device.create_event(),
                loaded=device.create_event(),
                updated=device.create_event(),
                stored=device.create_event(),
            )
            for index, nbytes in enumerate(sizes)
        ]
        pipeline = (
            PackedPipeline(device, Ledger(), [(arena, arena.nbytes) for arena in ring])
            if kind == "packed"
            else PerTensorPipeline(device, Ledger())
        )
        pipeline.run(batches, update, meanwhile)
        return batches, pipeline.meanwhile_done.at

    return run
