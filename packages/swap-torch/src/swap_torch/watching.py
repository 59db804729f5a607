# SPDX-License-Identifier: Apache-2.0
"""Trace the updates of one optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swap_core import Tracer
from swap_torch.engine import SwapEngine

__all__ = ["traced"]


@contextmanager
def traced(engine: SwapEngine, file: str | Path) -> Iterator[None]:
    """Write what the engine's updates do inside ``with`` to ``file``, also if they raise.

    Raises:
        OSError: the file cannot be written; nothing was run.
        RuntimeError: the optimizer is being traced already.
    """
    if engine.tracer is not None:
        raise RuntimeError(
            "trace: this optimizer is being traced already; end that trace first, or let it last "
            "longer."
        )
    tracer = Tracer(file)
    try:
        engine.watch(tracer)
        yield
    finally:
        try:
            engine.watch(None)
        finally:
            tracer.finish()
