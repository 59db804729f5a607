# SPDX-License-Identifier: Apache-2.0
"""Ascend, through the documented interface of ``mindspore.runtime``.

Not yet run on a card: the order of its calls is checked with a stand-in of ``mindspore.runtime``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, final

from mindspore import Tensor, mint, runtime

from swap_mindspore.device import DeviceMemory, Transfer, empty_storages, fill_storages

__all__ = ["AscendDevice", "ascend_device"]


@final
class AscendDevice:
    """The Ascend card of this process (MindSpore drives one card per process).

    Use :func:`ascend_device`, which makes one: copy streams are few and are never closed.
    """

    target = "Ascend"
    out_of_memory = MemoryError

    def __init__(self) -> None:
        self.load_stream = runtime.Stream()
        self.store_stream = runtime.Stream()
        self.pinned = True

    def compute_stream(self) -> Any:  # noqa: ANN401  # a mindspore.runtime.Stream, which is untyped
        """The caller's current stream."""
        return runtime.current_stream()

    def create_event(self) -> Any:  # noqa: ANN401
        """Make an event that also takes the time."""
        return runtime.Event(enable_timing=True)

    def record(self, event: Any, stream: Any) -> None:  # noqa: ANN401
        """Record ``event`` on ``stream``."""
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Queue a wait on ``stream``."""
        event.wait(stream)

    def synchronize(self, event: Any) -> None:  # noqa: ANN401
        """Block the host until ``event`` happened."""
        event.synchronize()

    def elapsed(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """Seconds between two events that happened."""
        return float(start.elapsed_time(end)) / 1e3

    def restore(self, memory: DeviceMemory) -> None:
        """Resize the storages from 0, all or none, out of the current stream's pool."""
        try:
            fill_storages(memory)
        except BaseException:
            self.release(memory)
            raise

    def release(self, memory: DeviceMemory) -> None:
        """Resize the storages to 0; the blocks go back to MindSpore's pool."""
        empty_storages(memory)

    def release_behind(self, memory: DeviceMemory, stream: Any) -> None:  # noqa: ANN401
        """Let the compute stream wait for ``stream``, and release."""
        done = self.create_event()
        done.record(stream)
        done.wait(self.compute_stream())
        self.release(memory)

    def copy_in(self, stream: Any, transfers: Sequence[Transfer]) -> None:  # noqa: ANN401
        """Queue host-to-device copies."""
        with runtime.StreamCtx(stream):
            for device, host in transfers:
                device.copy_(host, non_blocking=True)

    def copy_out(self, stream: Any, transfers: Sequence[Transfer]) -> None:  # noqa: ANN401
        """Queue device-to-host copies."""
        with runtime.StreamCtx(stream):
            for device, host in transfers:
                host.copy_(device, non_blocking=True)

    def allocate_host(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Allocate pinned memory, or pageable memory and one warning where pinning fails."""
        try:
            host = mint.empty(tuple(shape), dtype=dtype, device="CPU", pin_memory=True)
            runtime.synchronize()  # MindSpore reports a failure to pin only here
        except RuntimeError as error:
            if self.pinned:
                warnings.warn(
                    f"Pinning host memory for a state of shape {tuple(shape)} failed ({error}); "
                    f"optimizer states use pageable memory instead. Results are the same, but "
                    f"copies no longer overlap the update, so steps are slower. Raise the limit "
                    f"of locked memory (ulimit -l) or free host memory.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.pinned = False
            host = mint.empty(tuple(shape), dtype=dtype, device="CPU")
        return host

    def allocate_device(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Make a tensor on the card."""
        return mint.empty(tuple(shape), dtype=dtype, device="Ascend")


@cache
def ascend_device() -> AscendDevice:
    """Give the one :class:`AscendDevice` of this process."""
    return AscendDevice()
