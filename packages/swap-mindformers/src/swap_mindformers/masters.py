# SPDX-License-Identifier: Apache-2.0
"""Fp32 master parameters and the model parameters that are made from them.

[Note: stale masters]
An update works on the masters and then writes the model parameters. Who loads weights into the
model alone changes what the next update overwrites; natively that goes unseen. The documented way
is ``optimizer.reload_main_params_from_model()`` afterwards. Who forgets it is warned at the next
update: every loader of MindSpore puts other memory in a parameter's place, which shows in its
address at no cost; writes in place are looked for in samples of a few parameters, in rotation,
since weights that are loaded change nearly everywhere. Either makes it compare everything. What it
cannot see is a write in place to a part of the weights that no sample of this update meets.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, final

import numpy as np
from mindspore import Tensor, mint, nn
from numpy.typing import NDArray

from swap_mindspore.sharding import local_of

__all__ = ["Masters"]

_SAMPLED_PARAMETERS = 4
_SAMPLE = 64
"""Elements of each."""


@final
class Masters:
    """The pairs of one optimizer.

    Args:
        optimizer: Has them.
        module: Casts and copies as the native update does.
    """

    def __init__(self, optimizer: nn.Optimizer, module: ModuleType) -> None:
        self._module = module
        self._low = [i for i, low in enumerate(optimizer._is_low_precision_param) if low]
        self._addresses = self._addresses_in(optimizer)
        self._ahead: set[int] = set()
        """Parameters whose master was updated, and the model parameter not yet."""
        self._turn = 0

    def __contains__(self, index: int) -> bool:
        """Tell whether a parameter has a master."""
        return index in self._addresses

    def note_updated(self, index: int) -> None:
        """Remember that the master of a parameter is newer than the parameter."""
        self._ahead.add(index)

    def sync(self, model_param: Tensor, master: Tensor, index: int) -> None:
        """Write a model parameter anew from its master, rounded as natively."""
        self._module.inplace_copy(model_param, self._module.op_cast(master, model_param.dtype))
        self._ahead.discard(index)

    def sync_rest(self, optimizer: nn.Optimizer) -> None:
        """Write the parameters whose masters did not swap, and take note of all addresses."""
        for index in sorted(self._ahead):
            master = local_of(optimizer.fp32_params[index])
            self.sync(local_of(optimizer._parameters[index]), master, index)
        self._addresses = self._addresses_in(optimizer)

    def warn_if_stale(self, optimizer: nn.Optimizer) -> None:
        """Warn if model parameters were changed since. See [Note: stale masters]."""
        watched = [index for index in self._low if index not in self._ahead]
        now = self._addresses_in(optimizer)
        replaced = any(now[index] != self._addresses[index] for index in watched)
        if not replaced and not self._stale_samples(optimizer, watched):
            return
        stale = [index for index in watched if self._differs(optimizer, index)]
        if stale:
            warnings.warn(
                f"{len(stale)} model parameters ({optimizer._parameters[stale[0]].name}, …) are "
                f"not what the fp32 master parameters of this AdamW say: they were changed after "
                f"the last update, such as by loading weights. This update goes on from the "
                f"masters, as natively, and the change is lost. After loading weights call "
                f"optimizer.reload_main_params_from_model(), or load the optimizer's state too.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _addresses_in(self, optimizer: nn.Optimizer) -> dict[int, int]:
        return {i: local_of(optimizer._parameters[i]).data_ptr() for i in self._low}

    def _stale_samples(self, optimizer: nn.Optimizer, watched: Sequence[int]) -> bool:
        """Compare a few elements of a few parameters, other ones each time."""
        count = min(_SAMPLED_PARAMETERS, len(watched))
        self._turn += 1
        chosen = [watched[(self._turn * count + i) % len(watched)] for i in range(count)]
        return any(self._differs(optimizer, index, sample=True) for index in chosen)

    def _differs(self, optimizer: nn.Optimizer, index: int, *, sample: bool = False) -> bool:
        model = local_of(optimizer._parameters[index])
        master = local_of(optimizer.fp32_params[index])
        start, count = 0, int(model.size)
        if sample:
            start = self._turn * _SAMPLE % count
            count = min(_SAMPLE, count - start)
        # The master may be in host memory, where the device's operators cannot reach it.
        expected = Tensor(master.asnumpy().reshape(-1)[start : start + count])
        rounded = self._module.op_cast(expected, model.dtype)
        found = mint.narrow(model.reshape(-1), 0, start, count)
        return not np.array_equal(_values(rounded), _values(found), equal_nan=True)


def _values(tensor: Tensor) -> NDArray[Any]:
    """As fp32, which holds every value of the half-precision types; numpy has no bfloat16."""
    return np.asarray(tensor.float().asnumpy())
