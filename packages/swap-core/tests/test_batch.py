# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from swap_core import Batch, Residency, SwapInternalError

MOVES = ("to_loading", "to_device", "to_storing", "to_host")

LEGAL = {
    (Residency.HOST, "to_loading"): Residency.LOADING,
    (Residency.LOADING, "to_device"): Residency.DEVICE,
    (Residency.DEVICE, "to_storing"): Residency.STORING,
    (Residency.STORING, "to_host"): Residency.HOST,
    # A load that is given up.
    (Residency.LOADING, "to_host"): Residency.HOST,
}

PATHS = {
    Residency.HOST: (),
    Residency.LOADING: MOVES[:1],
    Residency.DEVICE: MOVES[:2],
    Residency.STORING: MOVES[:3],
}

EXPECTED = {
    "to_loading": "HOST",
    "to_device": "LOADING",
    "to_storing": "DEVICE",
    "to_host": "STORING or LOADING",
}


def batch_in(residency: Residency) -> Batch[str, str, int]:
    batch = Batch(
        index=7,
        nbytes=30,
        memory="memory",
        transfers=(10, 20),
        restored="restored",
        loaded="loaded",
        updated="updated",
        stored="stored",
    )
    for move in PATHS[residency]:
        getattr(batch, move)()
    return batch


def test_starts_on_the_host_with_what_it_was_given() -> None:
    batch = batch_in(Residency.HOST)
    assert batch.residency is Residency.HOST
    assert (batch.index, batch.nbytes, batch.memory, batch.transfers) == (7, 30, "memory", (10, 20))
    assert (batch.restored, batch.loaded, batch.updated, batch.stored) == (
        "restored",
        "loaded",
        "updated",
        "stored",
    )


@pytest.mark.parametrize(("start", "move"), LEGAL)
def test_makes_each_legal_move(start: Residency, move: str) -> None:
    batch = batch_in(start)
    getattr(batch, move)()
    assert batch.residency is LEGAL[start, move]


@pytest.mark.parametrize(
    ("start", "move"),
    [(start, move) for start in PATHS for move in MOVES if (start, move) not in LEGAL],
)
def test_refuses_each_other_move_and_stays_where_it_is(start: Residency, move: str) -> None:
    batch = batch_in(start)
    with pytest.raises(SwapInternalError) as caught:
        getattr(batch, move)()
    assert str(caught.value).startswith(f"batch 7 is {start.name}, expected {EXPECTED[move]}. ")
    assert "bug in swap-core" in str(caught.value)
    assert "report it" in str(caught.value)
    assert batch.residency is start


def test_has_a_path_to_every_residency() -> None:
    assert {residency: batch_in(residency).residency for residency in Residency} == {
        residency: residency for residency in Residency
    }


def test_cannot_be_put_somewhere_else_by_hand() -> None:
    with pytest.raises(AttributeError, match="residency"):
        batch_in(Residency.HOST).residency = Residency.DEVICE  # type: ignore[misc]
