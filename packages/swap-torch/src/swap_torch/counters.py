# SPDX-License-Identifier: Apache-2.0
"""Step counters, side by side in host memory.

torch counts steps in one CPU tensor per parameter, and adds to them one by one: of a fused step of
816 one-element tensors that is more than half. Side by side, one addition advances a whole batch,
and one ``tolist()`` reads it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeGuard, final

import torch

from swap_torch.host import own_storage_view

__all__ = ["CounterTable"]


@final
class CounterTable:
    """Rows of counters. Each counter keeps a storage of its own, so it is saved and copied alone.

    What ``optimizer.state`` shows are the counters themselves: they may be read, written, or
    replaced by others, which the next :meth:`gather` moves into a row.
    """

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        """By address."""

    def gather(self, entries: Sequence[dict[str, Any]], keys: Sequence[str]) -> bool:
        """Move counters that are in no row into a new one, in the order of ``entries``.

        Only those that are on the CPU: on a device, one kernel advances any number of them.

        Args:
            entries: ``optimizer.state[param]`` of each parameter; values are replaced in it.
            keys: Which of them are counters.

        Returns:
            Whether there were any; then older rows may have become useless.
        """
        found = [(entry, key) for entry in entries for key in keys if _is_counter(entry.get(key))]
        # A counter that two parameters share advances twice per step, and must go on to.
        owners = Counter(id(entry[key]) for entry, key in found)
        loose: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
        for entry, key in found:
            if self._place(entry[key]) is None and owners[id(entry[key])] == 1:
                loose.setdefault(entry[key].dtype, []).append((entry, key))
        for members in loose.values():
            insort(self._rows, _new_row(members), key=_address)
        return bool(loose)

    def keep_only(self, entries: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        """Let go of rows in which none of these counters is."""
        values = [entry.get(key) for entry in entries for key in keys]
        places = [self._place(value) for value in values if _is_counter(value)]
        used = {place[0] for place in places if place is not None}
        self._rows = [row for number, row in enumerate(self._rows) if number in used]

    def row_of(self, counters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """One 1-D tensor over these counters; None if they do not follow each other in a row."""
        places = [self._place(counter) if _is_counter(counter) else None for counter in counters]
        first = places[0] if places else None
        if first is None:
            return None
        number, start = first
        expected = [(number, start + index) for index in range(len(counters))]
        return self._rows[number][start : start + len(counters)] if places == expected else None

    def _place(self, counter: torch.Tensor) -> tuple[int, int] | None:
        """The row that ``counter`` is in, and where."""
        number = bisect_right(self._rows, _address(counter), key=_address) - 1
        if number < 0:
            return None
        row, offset = self._rows[number], _address(counter) - _address(self._rows[number])
        if row.dtype != counter.dtype or offset >= row.nbytes:
            return None
        return number, offset // row.itemsize


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _is_counter(value: object) -> TypeGuard[torch.Tensor]:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.dim() == 0
        and not value.requires_grad
    )


def _new_row(members: Sequence[tuple[dict[str, Any], str]]) -> torch.Tensor:
    values = [entry[key] for entry, key in members]
    row = torch.stack(values)
    raw, size = row.view(torch.uint8), row.itemsize
    for index, (entry, key) in enumerate(members):
        own = raw[index * size : (index + 1) * size]
        entry[key] = own_storage_view(own, row.dtype, (), ())
    return row
