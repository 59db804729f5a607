# SPDX-License-Identifier: Apache-2.0
"""A tensor of a state dict, and what native makes of it.

The rules of casting are native's (``Optimizer._process_value_according_to_param_policy``): a state
takes the dtype and the device of its parameter, whatever it is used for; only what is called
``step`` keeps its own, except that fused kernels want it as float32 on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swap_torch.adapter import TorchUnit
from swap_torch.forms import copied_to, hollow
from swap_torch.sharding import local_of, wrap_like

__all__ = ["LoadedState", "each_value"]

_COUNTER = "step"


@dataclass(frozen=True, slots=True)
class LoadedState:
    """One tensor of a state dict and the parameter that it is for."""

    unit: TorchUnit
    key: str
    value: torch.Tensor
    """As it is in the state dict."""
    group: Mapping[str, Any]
    """The options that its group has in the state dict, complete."""
    used: bool
    """Whether updates with these options use it as a state that may swap."""
    steps_itself: bool
    """Whether the optimizer's own step counts; else swap-torch's kernels want counters on the
    CPU."""

    @property
    def name(self) -> tuple[torch.Tensor, str]:
        """Parameter and key."""
        return self.unit.param, self.key

    @property
    def like(self) -> torch.Tensor:
        """A local tensor without values: dtype, shape and strides that it will have."""
        return hollow(local_of(self.value), self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        param, value = local_of(self.unit.param), local_of(self.value)
        if self.key == _COUNTER:
            return torch.float32 if self.group.get("fused") else value.dtype
        return param.dtype if param.is_floating_point() else value.dtype

    @property
    def _device(self) -> torch.device:
        if self.key != _COUNTER or self.group.get("fused"):
            return local_of(self.unit.param).device
        return local_of(self.value).device if self.steps_itself else torch.device("cpu")

    def where_it_stays(self) -> torch.Tensor:
        """A copy with native's dtype, on the device where native has it."""
        copied = copied_to(local_of(self.value), self._device, self._dtype)
        return wrap_like(self.value, copied, state_exists=True)


def each_value(value: object, found: Callable[[object, str], object], key: str = "") -> object:
    """Rebuild dicts, lists, tuples and sets, in which native looks for tensors too.

    Args:
        value: What a state dict has for a state.
        found: Gives what takes the place of anything else; gets its key in the innermost dict.
        key: That of ``value``.
    """
    kind: Any = type(value)
    if isinstance(value, dict):
        return {name: each_value(each, found, name) for name, each in value.items()}
    if isinstance(value, (list, tuple, set)) and kind in (list, tuple, set):
        return kind(each_value(each, found) for each in value)
    return found(value, key)
