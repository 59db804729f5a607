# SPDX-License-Identifier: Apache-2.0
"""The way back: every batch on the host, no device memory held, after an error or on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from swap_core.batch import Batch
from swap_core.errors import StateLostError
from swap_core.moves import Moves
from swap_core.slot import Residency

__all__ = ["bring_to_host"]

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")
MemoryT = TypeVar("MemoryT")
TransferT = TypeVar("TransferT")

_INTERRUPTS_BORNE = 3


def bring_to_host(
    moves: Moves[StreamT, EventT, MemoryT, TransferT],
    compute: StreamT,
    batches: Sequence[Batch[EventT, MemoryT, TransferT]],
    release_all: Callable[[], None],
    error: BaseException | None,
) -> None:
    """Bring every batch to the host and give all device memory back. Blocks the host.

    A batch on the device may be updated in part, and its parameters with it: its states go to
    the host, so that they belong to those parameters. A loaded batch was not touched: its
    load is given up. Events of batches are not touched: they tell the times of the latest update.

    Who waits for this may interrupt it: each part is then done again, and the first error
    raised in the end.

    Args:
        moves: Stores, on its device.
        compute: The stream of the update.
        batches: Those of the update.
        release_all: Gives back what device memory is held.
        error: What happened; None between updates.

    Raises:
        StateLostError: a batch could not be stored. Memory was given back even so.
    """
    lost = _stored_home(moves, compute, batches)
    try:
        _despite_interrupts(release_all)
    finally:
        if lost:
            _raise_lost(lost, len(batches), error)


def _stored_home(
    moves: Moves[StreamT, EventT, MemoryT, TransferT],
    compute: StreamT,
    batches: Sequence[Batch[EventT, MemoryT, TransferT]],
) -> list[int]:
    """Bring the values of every batch to the host; tell which were lost."""
    lost = {batch.index for batch in batches if not _stored_again(moves, compute, batch)}
    try:
        _despite_interrupts(partial(moves.join, compute))
    except Exception:  # noqa: BLE001  # whatever it is, memory must be given back
        lost |= {batch.index for batch in batches if batch.residency is Residency.STORING}
    for batch in batches:
        if batch.residency is not Residency.HOST:
            batch.to_host()
    return sorted(lost)


def _stored_again(
    moves: Moves[StreamT, EventT, MemoryT, TransferT],
    compute: StreamT,
    batch: Batch[EventT, MemoryT, TransferT],
) -> bool:
    """Store a batch that is on the device; tell whether its states will be on the host."""

    def store() -> None:
        if batch.residency is Residency.DEVICE:
            moves.store_home(compute, batch)

    try:
        _despite_interrupts(store)
    except Exception:  # noqa: BLE001  # whatever it is, the others must be saved
        batch.to_storing()
        return False
    return True


def _raise_lost(lost: Sequence[int], count: int, error: BaseException | None) -> NoReturn:
    after = "after an error" if error is not None else "between updates"
    raise StateLostError(
        f"Batches {list(lost)} of {count} could not be stored to the host {after}, "
        f"not even on a second attempt: their states on the host are older than their "
        f"parameters. Go on from a checkpoint. (First error: {error!r})"
    ) from error


def _despite_interrupts(action: Callable[[], None]) -> None:
    """Run ``action``, from its beginning again if it is interrupted, such as with Ctrl-C."""
    for _ in range(_INTERRUPTS_BORNE):
        try:
            return action()
        except Exception:
            raise
        except BaseException:  # noqa: BLE001  # the error that this follows is raised
            continue
    return action()
