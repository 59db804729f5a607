# SPDX-License-Identifier: Apache-2.0
"""Which states swap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import final

import mindspore as ms
from mindspore import Parameter

from swap_core import StayReason, SwapOptimizerConfig
from swap_mindspore.ascend import ascend_device
from swap_mindspore.device import AnyMindSporeDevice
from swap_mindspore.sharding import local_of

__all__ = ["Eligibility", "default_device"]

_FLOATING = (ms.float16, ms.float32, ms.float64, ms.bfloat16)


def default_device() -> AnyMindSporeDevice | None:
    """The device of this process; None on the CPU, where there is no device memory to save."""
    return ascend_device() if ms.get_context("device_target") == "Ascend" else None


@final
class Eligibility:
    """The rules of one wrapped optimizer.

    Args:
        config: Selects keys and sizes.
        device: What swaps; None: nothing does.
        tensors: All states and parameters, to see which of them share memory.
    """

    def __init__(
        self,
        config: SwapOptimizerConfig,
        device: AnyMindSporeDevice | None,
        tensors: Iterable[Parameter],
    ) -> None:
        self._config = config
        self._device = device
        self._addresses = Counter(local_of(tensor).data_ptr() for tensor in tensors)

    def stay_reason(self, key: str, state: Parameter) -> StayReason | None:
        """Why a state stays where it is, or None if it swaps."""
        keys = self._config.state_keys
        state = local_of(state)
        if key == "master_param" and not self._config.include_master_params:
            return StayReason.MASTER
        if keys is not None and key not in keys:
            return StayReason.NOT_SELECTED
        if state.dtype not in _FLOATING:
            return StayReason.NOT_FLOATING
        if self._device is None or state.device.partition(":")[0] != self._device.target:
            return StayReason.ON_CPU
        if not state.is_contiguous():
            return StayReason.NOT_DENSE
        # An empty tensor has no bytes to move, whatever min_numel says.
        if state.size < max(1, self._config.min_numel):
            return StayReason.TOO_SMALL
        alone = self._addresses[state.data_ptr()] == 1
        if not alone or state.untyped_storage().nbytes() != state.nbytes:
            return StayReason.SHARES_STORAGE
        return None
