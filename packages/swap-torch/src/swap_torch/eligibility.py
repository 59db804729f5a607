# SPDX-License-Identifier: Apache-2.0
"""Which states swap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from swap_core import StayReason, SwapOptimizerConfig
from swap_torch.device import AnyTorchDevice, accelerator_device
from swap_torch.forms import memories_of
from swap_torch.matching import qualified_name

__all__ = ["Eligibility", "is_dense"]


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The rules of one wrapped optimizer.

    Args:
        config: Selects keys and sizes.
        device: Used for tensors on its ``torch_device``; None: each accelerator's own.
        wrappers: Wrapper subclasses that states may be, by qualified name.
    """

    config: SwapOptimizerConfig
    device: AnyTorchDevice | None
    wrappers: frozenset[str] = frozenset()

    def device_of(self, param: torch.Tensor) -> AnyTorchDevice | None:
        """The device that swaps the states of ``param`` (a local tensor); None if none does."""
        if self.device is not None and param.device == self.device.torch_device:
            return self.device
        if param.device.type in ("cpu", "meta"):
            return None
        return accelerator_device(param.device)

    def stay_reason(
        self, key: str, param: torch.Tensor, state: torch.Tensor, *, exists: bool
    ) -> StayReason | None:
        """Why a state stays where it is, or None if it swaps.

        Args:
            key: The state's name.
            param: The local tensor of its parameter, which decides the device.
            state: The local tensor of the state or, if it does not exist yet, one that it will
                be like.
            exists: Whether ``state`` is the state itself.
        """
        keys = self.config.state_keys
        if keys is not None and key not in keys:
            return StayReason.NOT_SELECTED
        memories = memories_of(state)
        wrapped = qualified_name(type(state)) in self.wrappers
        if not (wrapped or _is_plain(state)) or not all(map(_is_plain, memories)):
            return StayReason.NOT_PLAIN
        if not state.dtype.is_floating_point:
            return StayReason.NOT_FLOATING
        if param.device.type == "meta" or is_lazy(param):
            return StayReason.NOT_MATERIALISED
        if self.device_of(param) is None:
            return StayReason.ON_CPU
        if state.layout is not torch.strided or (exists and not all(map(is_dense, memories))):
            return StayReason.NOT_DENSE
        # An empty tensor has no bytes to move, whatever min_numel says.
        if state.numel() < max(1, self.config.min_numel):
            return StayReason.TOO_SMALL
        if exists and not all(map(_owns_storage, memories)):
            return StayReason.SHARES_STORAGE
        return None


def _owns_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether this is torch's own kind of tensor, with one storage that holds its values.

    By type and not ``isinstance``: a wrapper subclass (quantized, say) in ``nn.Parameter`` is an
    instance of Parameter too.
    """
    kind = type(tensor)
    return kind is torch.Tensor or torch.nn.Parameter in kind.__mro__


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill one block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
