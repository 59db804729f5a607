# SPDX-License-Identifier: Apache-2.0
"""How the values of a state lie in memory: as one plain tensor, or as several inside a wrapper.

A quantized state is a traceable wrapper subclass: a tensor without memory of its own, around those
that ``__tensor_flatten__`` names (codes, scales, a table). They move together, as one state, each
at its offset in the state's bytes; what they are in is made anew around them on each side, as
torch.compile does, with ``__tensor_unflatten__``.

Tensors here are local: what is inside a DTensor, never the DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swap_core import align

__all__ = [
    "Form",
    "Memory",
    "copied_to",
    "copy_values",
    "detached",
    "hollow",
    "is_wrapper",
    "memories_of",
    "shaped",
    "state_nbytes",
    "with_memories",
]


def shaped(param: torch.Tensor) -> torch.Tensor:
    """``param``, to look at; one of a lazy module that has no shape yet: an empty tensor."""
    return torch.empty(0, dtype=param.dtype, device=param.device) if is_lazy(param) else param


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor says that others hold its values."""
    return bool(is_traceable_wrapper_subclass(tensor))


def memories_of(local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the values: those inside a wrapper, in its order, or the tensor."""
    if not is_wrapper(local):
        return (local,)
    names, _ = _flattened(local)
    return tuple(getattr(local, name) for name in names)


def with_memories(like: torch.Tensor, memories: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a tensor of the kind of ``like`` around other memories; a plain one is the memory."""
    if not is_wrapper(like):
        (memory,) = memories
        return memory
    names, context = _flattened(like)
    kind: Any = type(like)
    inner = dict(zip(names, memories, strict=True))
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, like.shape, like.stride())
    return made


def detached(local: torch.Tensor) -> torch.Tensor:
    """A new tensor object over the same memories, without history."""
    return with_memories(local, [memory.detach() for memory in memories_of(local)])


def hollow(local: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor without values, on the meta device, that is otherwise like ``local`` as ``dtype``.

    What a wrapper makes of ``dtype`` is its own affair: it mostly only says another one.
    """
    if is_wrapper(local):
        cast = local if dtype is None else local.to(dtype)
        return with_memories(cast, [_meta(memory) for memory in memories_of(cast)])
    return _meta(local, dtype)


def copied_to(
    local: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A copy on ``device``, even if ``local`` is there, with memories of its own.

    ``.to(copy=True)`` is not enough: wrappers need not heed ``copy``.
    """
    if is_wrapper(local):
        cast = local if dtype is None else local.to(dtype)
        copies = [memory.detach().to(device, copy=True) for memory in memories_of(cast)]
        return with_memories(cast, copies)
    return local.detach().to(device=device, dtype=dtype, copy=True)


def copy_values(to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy between two tensors of one form; plain ones may differ in dtype."""
    pairs = zip(memories_of(to), memories_of(source), strict=True)
    for memory, value in pairs:
        memory.copy_(value, non_blocking=non_blocking)


def state_nbytes(local: torch.Tensor) -> int:
    """Bytes of a state's values, each memory but the first beginning at an aligned offset."""
    end = 0
    for memory in memories_of(local):
        end = align(end) + memory.numel() * memory.element_size()
    return end


def _flattened(wrapper: Any) -> tuple[list[str], object]:  # noqa: ANN401  # has the protocol
    """The names of the tensors inside, and what else is to be known to make it anew."""
    flattened: tuple[list[str], object] = wrapper.__tensor_flatten__()
    return flattened


def _meta(memory: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(memory, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Memory:
    """One tensor among the bytes of a state; dense."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    """In elements."""
    offset: int
    """In bytes from the first one of the state."""

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.shape.numel() * self.dtype.itemsize

    @property
    def bytes(self) -> slice:
        """Its bytes among the state's."""
        return slice(self.offset, self.end)


@final
class Form:
    """What two states have in common if values of one can live in memory of the other.

    Args:
        local: The state, or what it will be like; its values are not looked at. A state is dense,
            so it is dense with its dimensions in this order.
    """

    __slots__ = ("_like", "memories")

    def __init__(self, local: torch.Tensor) -> None:
        memories: list[Memory] = []
        end = 0
        for each in memories_of(local):
            stride = tuple(_meta(each).stride())
            memories.append(Memory(each.dtype, each.shape, stride, align(end)))
            end = memories[-1].end
        self.memories = tuple(memories)
        self._like = hollow(local) if is_wrapper(local) else None

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last value."""
        return self.memories[-1].end

    def over(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a state of this form over tensors that are as :attr:`memories` says."""
        if self._like is not None:
            return with_memories(self._like, memories)
        (memory,) = memories
        return memory

    def empty_on(self, device: torch.device) -> torch.Tensor:
        """Make a state of this form with new memory, not filled."""
        return self.over(
            [
                torch.empty_strided(memory.shape, memory.stride, dtype=memory.dtype, device=device)
                for memory in self.memories
            ]
        )

    def __eq__(self, other: object) -> bool:
        """The same memories, in the same kind of wrapper that knows the same of them."""
        if not isinstance(other, Form):
            return NotImplemented
        return self.memories == other.memories and self._wrapper() == other._wrapper()

    __hash__ = None  # type: ignore[assignment]  # what a wrapper knows need not have one

    def _wrapper(self) -> tuple[type, object] | None:
        like = self._like
        return None if like is None else (type(like), _flattened(like)[1])
