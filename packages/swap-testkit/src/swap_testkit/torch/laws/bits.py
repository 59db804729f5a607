# SPDX-License-Identifier: Apache-2.0
"""Laws of numbers: what is computed, how often it is counted, with which options."""

from __future__ import annotations

import torch

from swap_core import UnknownStateKeyError
from swap_testkit.torch.compare import same_bits
from swap_testkit.torch.laws.subject import Mask, Pair, Subject, engine_of, law_config, report_of

__all__ = [
    "each_key_alone",
    "gradients_that_come_and_go",
    "groups",
    "hooks",
    "same_bits_whatever_the_batches",
]


def same_bits_whatever_the_batches(subject: Subject) -> None:
    """Parameters, states, counters and options have native bits, however they are batched."""
    for dtype in subject.dtypes:
        for packed in (True, False):
            for swap_times, min_numel in ((1, 2), (3, 0), (99, 20)):
                config = law_config(swap_times=swap_times, min_numel=min_numel, packed_swap=packed)
                pair = Pair(subject, config, dtype=dtype)
                pair.train(4)
                _same_attributes(pair)
    pair = Pair(subject, law_config(), native_steps=2)
    pair.check()
    pair.train(2)


def _same_attributes(pair: Pair) -> None:
    """Numbers that the optimizer keeps in itself."""
    for key, one in vars(pair.native).items():
        other = vars(pair.swapped).get(key)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert same_bits(one, other), f"optimizer.{key}: native {one}, swapped {other}"
        elif isinstance(one, (bool, int, float, str)):
            assert one == other, f"optimizer.{key}: native {one!r}, swapped {other!r}"


def gradients_that_come_and_go(subject: Subject) -> None:
    """A parameter without a gradient is left alone: no update, no counter, no state, no copy."""
    pair = Pair(subject, law_config(swap_times=99))
    pair.train(len(subject.shapes) + 1, lambda step, position: position <= step)
    pair.train(4, lambda step, position: (step + position) % 3 != 0)
    pair.train(1, lambda step, position: False)
    before = report_of(pair.swapped).ledger.bytes_loaded
    pair.train(1, lambda step, position: position == 0)
    moved = report_of(pair.swapped).ledger.bytes_loaded - before
    homes = engine_of(pair.swapped)._table.homes
    own = homes.of(pair.swapped.param_groups[0]["params"][0]).values()
    expected = sum(home.slot.span.nbytes for home in own)
    assert moved == expected, f"{moved} bytes were loaded for a parameter with {expected}"


def groups(subject: Subject) -> None:
    """Groups may differ in all options, be added, and change their learning rates."""
    for swap_times in (1, 2, 99):
        pair = Pair(subject, law_config(swap_times=swap_times), grouped=True)
        pair.train(2)
        for optimizer in (pair.native, pair.swapped):
            late = {**subject.group_options[-1], "params": subject.parameters(seed=7)}
            optimizer.add_param_group(late)
        pair.train(2)
        for optimizer in (pair.native, pair.swapped):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
        pair.train(2)
        # A group that has no gradient may count nevertheless.
        pair.train(2, _all_before(sum(len(g["params"]) for g in pair.native.param_groups[:-1])))


def _all_before(last: int) -> Mask:
    return lambda step, position: position < last


def hooks(subject: Subject) -> None:
    """Hooks run once per step, and the optimizer stays an object of its class."""
    pair = Pair(subject, law_config(swap_times=99))
    seen: list[str] = []
    pair.swapped.register_step_pre_hook(lambda *_: seen.append("before"))
    pair.swapped.register_step_post_hook(lambda *_: seen.append("after"))
    pair.train(2)
    assert seen == ["before", "after"] * 2, f"two steps ran hooks: {seen}"
    assert isinstance(pair.swapped, type(pair.native))
    scheduler = torch.optim.lr_scheduler.StepLR(pair.swapped, 1, gamma=0.5)
    lr = float(pair.swapped.param_groups[0]["lr"])  # a tensor would be changed in place
    pair.give_gradients()
    pair.swapped.step()
    scheduler.step()
    assert pair.swapped.param_groups[0]["lr"] == lr * 0.5


def each_key_alone(subject: Subject) -> None:
    """Each state that the adapter names exists, and can swap alone; others are refused by name."""
    pair = Pair(subject, law_config())
    groups = pair.swapped.param_groups
    adapter = engine_of(pair.swapped).adapter
    keys = list(dict.fromkeys(key for group in groups for key in adapter.state_keys(group)))
    assert keys, "the adapter names no state"
    pair.train(1)
    made = {key for entry in pair.swapped.state.values() for key in entry}
    missing = [key for key in (*keys, *adapter.counter_keys()) if key not in made]
    assert not missing, f"the adapter names {missing}, but the optimizer made {sorted(made)}"
    for key in keys:
        alone = Pair(subject, law_config(state_keys=(key,)))
        alone.train(3)
        swapping = {s.key for s in report_of(alone.swapped).states if s.stays is None and s.born}
        assert swapping == {key}, f"with state_keys=({key!r},) these swap: {sorted(swapping)}"
    told = _refusal(subject)
    assert told is not None, "an unknown name in state_keys is not refused"
    untold = [key for key in keys if key not in told]
    assert not untold, f"the refusal of an unknown key does not name {untold}: {told}"


def _refusal(subject: Subject) -> str | None:
    try:
        Pair(subject, law_config(state_keys=("no_such_state",)))
    except UnknownStateKeyError as error:
        return str(error)
    return None
