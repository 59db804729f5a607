# SPDX-License-Identifier: Apache-2.0
"""What a collective between simulated accelerators gives back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

__all__ = ["Result", "SimulatedWork", "Waitable", "Works"]

Result: TypeAlias = Any
"""The caller's own tensors, in the lists in which they came."""

_WorkBase: Any = vars(dist)["_Work"]


class Waitable(Protocol):
    """A work of gloo."""

    def wait(self) -> object:
        """Block until it is done."""
        ...


class SimulatedWork(_WorkBase):  # type: ignore[misc]  # torch does not type it
    """A collective that is queued: done for the host, but other streams must wait for it.

    Args:
        result: What was written to.
        event: Marks its end on the group's stream; None: nothing to wait for.
        kept: Its memory must not be used again before somebody waits.
        finish: What is left to do, at the first ``wait()``, after :attr:`unfinished` is done.
    """

    def __init__(
        self,
        result: Result,
        event: torch.Event | None,
        kept: Result,
        finish: Callable[[], SimulatedWork] | None = None,
    ) -> None:
        super().__init__()
        self.unfinished: list[Waitable] = []
        self.event = event
        self._kept = kept
        self._result = result
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait."""
        for work in self.unfinished:
            work.wait()
        self.unfinished = []
        if self._finish is not None:
            self.event, self._finish = self._finish().event, None
        if self.event is not None:
            torch.accelerator.current_stream().wait_event(self.event)
        self._kept = None
        return True

    def is_completed(self) -> bool:
        """Whether the host has nothing left to do."""
        return not self.unfinished

    def is_success(self) -> bool:
        """Errors were raised before."""
        return True

    def result(self) -> Result:
        """What was written to."""
        return self._result

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Result]:
        """A future that is done; the current stream waits."""
        self.wait()
        future: torch.futures.Future[Result] = torch.futures.Future()
        future.set_result(self._result)
        return future


class Works:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all are done."""
        for work in self._works:
            work.wait()
