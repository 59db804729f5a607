# SPDX-License-Identifier: Apache-2.0
"""Laws of state dicts, copies and phases."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

from swap_testkit.torch.laws.subject import Pair, Subject, law_config
from swap_testkit.torch.record import array_of
from swap_torch import TorchSwapOptimizer

__all__ = ["copies", "phases", "state_dicts"]


def state_dicts(subject: Subject) -> None:
    """State dicts are native ones, do not change later, and load both ways."""
    for dtype in subject.dtypes:
        _saved_and_loaded(subject, dtype)


def _saved_and_loaded(subject: Subject, dtype: torch.dtype) -> None:
    pair = Pair(subject, law_config(), dtype=dtype)
    _assert_equal(pair.native.state_dict(), pair.swapped.state_dict(), "before the first step")
    pair.train(2, lambda step, position: position != 1)
    native, swapped = (_file(each) for each in (pair.native, pair.swapped))
    held = pair.swapped.state_dict()
    _assert_equal(_read(native), held, "after two steps")
    pair.train(1)
    _assert_equal(_read(native), held, "when it is looked at a step later")
    for one, other in ((native, swapped), (swapped, native)):
        resumed = Pair(subject, law_config(), dtype=dtype)
        for optimizer, file in ((resumed.native, one), (resumed.swapped, other)):
            optimizer.load_state_dict(_read(file))
        resumed.check()
        resumed.train(2)
    # Into one that has states, and memory for them.
    pair.native.load_state_dict(_read(swapped))
    pair.swapped.load_state_dict(_read(native))
    pair.check()
    pair.train(2)


def _file(optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


def _read(file: bytes) -> dict[str, Any]:
    read: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return read


def _assert_equal(native: dict[str, Any], swapped: dict[str, Any], when: str) -> None:
    one, other = _plain(native), _plain(swapped)
    assert one == other, f"the state dict {when} is {other}, natively {one}"


def _plain(value: object) -> object:
    """A state dict without tensors: what they are in a few words."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {array_of(value).digest()}"
    return value


def copies(subject: Subject) -> None:
    """A deep copy goes on by itself, with the same bits."""
    pair = Pair(subject, law_config())
    pair.train(2)
    pair.native, pair.swapped = copy.deepcopy(pair.native), copy.deepcopy(pair.swapped)
    pair.check()
    pair.train(2)


def phases(subject: Subject) -> None:
    """``reload()`` and ``offload()`` at any time change no bit."""
    pair = Pair(subject, law_config())
    swapped = pair.swapped
    assert isinstance(swapped, TorchSwapOptimizer)
    swapped.reload()
    pair.train(1)
    swapped.offload()
    pair.check()
    pair.train(1)
    swapped.reload()
    pair.train(2)
    with swapped.states_on_device():
        pair.train(1)
    swapped.offload()
    pair.train(2)
