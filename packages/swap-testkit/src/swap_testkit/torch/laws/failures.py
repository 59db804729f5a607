# SPDX-License-Identifier: Apache-2.0
"""The law of failures."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from swap_testkit.recording import Tamper
from swap_testkit.torch.laws.subject import Pair, Subject, engine_of, law_config
from swap_testkit.torch.record import array_of
from swap_torch.adapter import TorchStep, UpdateCall

__all__ = ["failures"]

_ZERO = "zero"
_VERBS = ("allocate_host", "restore", "copy_in", "copy_out", "update")
_Picture = list[dict[str, str]]


class _PlannedError(RuntimeError):
    """Raised in place of a call."""


def failures(subject: Subject) -> None:
    """Whatever fails in an update, each parameter is as before it or after it, with its states."""
    for packed, steps_before in ((True, 0), (True, 2), (False, 2)):
        for verb in _VERBS:
            nth = 0
            while _survives(subject, packed, steps_before, verb, nth):
                nth = 2 * nth or 1


def _survives(subject: Subject, packed: bool, steps_before: int, verb: str, nth: int) -> bool:
    """Let one call fail; tell whether there was such a call."""
    pair = Pair(subject, law_config(packed_swap=packed))
    pair.train(steps_before)
    pair.give_gradients()
    before = _picture(pair.native)
    options = _options(pair.native)
    tamper = Tamper(verb, nth, _PlannedError(f"{verb} {nth}"), times=1)
    pair.device.tamper = tamper
    if verb == "update":
        _tamper_with_updates(pair, tamper)
    with suppress(_PlannedError):
        pair.swapped.step()
    pair.device.tamper = None
    vars(engine_of(pair.swapped).adapter).pop("step_batch", None)
    pair.native.step()
    after = _picture(pair.native)
    where = f"call {nth} of {verb} failed in step {steps_before + 1}"
    assert pair.inner.held_bytes == 0, f"{where}, and {pair.inner.held_bytes} bytes are held"
    pictures = zip(_picture(pair.swapped), before, after, strict=True)
    for number, (now, old, new) in enumerate(pictures):
        assert now == new or _shows(now, old), (
            f"{where}, and parameter {number} is neither as before nor as after it: {now}, before "
            f"{old}, after {new}"
        )
    known = (options, _options(pair.native))
    assert _options(pair.swapped) in known, (
        f"{where}, and the groups have {_options(pair.swapped)}; {known} is known"
    )
    pair.give_gradients()
    pair.swapped.step()
    values = [q for _, q in pair.pairs()]
    assert all(value.isfinite().all() for value in values), f"{where}, and the next step was wrong"
    return tamper.fired > 0


def _tamper_with_updates(pair: Pair, tamper: Tamper) -> None:
    adapter = engine_of(pair.swapped).adapter
    native = adapter.step_batch

    def step_batch(step: TorchStep, call: UpdateCall) -> None:
        if tamper.strikes():
            raise tamper.error or AssertionError
        native(step, call)

    adapter.step_batch = step_batch  # type: ignore[method-assign]


def _picture(optimizer: torch.optim.Optimizer) -> _Picture:
    """Each parameter with its states, in a form that can be compared."""
    return [
        {"": array_of(param).digest(), **_digests(optimizer.state.get(param, {}))}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def _shows(now: Mapping[str, str], old: Mapping[str, str]) -> bool:
    """Tell whether a parameter is as before; an adapter may have made its states, of zeros."""
    states = [value for key, value in now.items() if key]
    unmade = len(old) == 1 and now[""] == old[""]
    return now == old or (unmade and all(value == _ZERO for value in states))


def _digests(entry: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: _digest(value) if isinstance(value, torch.Tensor) else repr(value)
        for key, value in entry.items()
    }


def _digest(value: torch.Tensor) -> str:
    array = array_of(value)
    return array.digest() if array.bits.any() else _ZERO


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return copy.deepcopy(groups)
