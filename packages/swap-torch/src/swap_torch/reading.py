# SPDX-License-Identifier: Apache-2.0
"""What a state dict holds for an optimizer, checked. Nothing is changed or copied here."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, final

import torch

from swap_core import StateDictError, UnsupportedOptionError, UpdateUnit
from swap_torch.adapter import TorchSwapAdapter, TorchUnit, owner_name
from swap_torch.forms import shaped
from swap_torch.loaded import LoadedState, each_value
from swap_torch.sharding import is_sharded, local_of

__all__ = ["LoadedEntries", "read_state_dict"]


_NOT_COPIED = {"state", "param_groups", "step", "_swap"}
_SPARSE = (torch.sparse_coo,)
"""A state that is made of a sparse gradient is like it."""

LoadedEntries: TypeAlias = list[tuple[torch.Tensor, dict[str, Any]]]
"""Each parameter that has an entry, with its states; each tensor, in containers too, is a
:class:`LoadedState`."""


def read_state_dict(
    optimizer: torch.optim.Optimizer,
    kind: type[torch.optim.Optimizer],
    adapter: TorchSwapAdapter,
    state_dict: Mapping[str, Any],
) -> LoadedEntries:
    """Find what belongs to which parameter, by position in the groups, as natively.

    Args:
        optimizer: What loads it.
        kind: Its class without swapping.
        adapter: Its adapter.
        state_dict: What is loaded.

    Raises:
        StateDictError: it does not fit the optimizer; names group, parameter and key.
    """
    return _Reader(optimizer, kind, adapter).read(state_dict)


@final
class _Reader:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        adapter: TorchSwapAdapter,
    ) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._adapter = adapter

    def read(self, state_dict: Mapping[str, Any]) -> LoadedEntries:
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise StateDictError(
                    f"load_state_dict: there is no {key!r} in the state dict, which has "
                    f"{sorted(map(str, state_dict))}. Give what state_dict() of an optimizer "
                    f"returned."
                )
        groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
        self._check_groups(groups)
        options = self._complete(groups)
        self._check_options(options)
        entries: Mapping[Any, Any] = state_dict["state"]
        read: LoadedEntries = []
        for unit, where, group, number in self._places(groups, options):
            entry = entries.get(number)
            if entry is None:
                continue
            if not isinstance(entry, Mapping):
                raise StateDictError(
                    f"load_state_dict: the state of {where} is a {type(entry).__name__}; a dict "
                    f"of its states is accepted."
                )
            self._check_entry(unit.param, where, group, entry)
            values = {key: self._value(unit, group, key, value) for key, value in entry.items()}
            read.append((unit.param, values))
        return read

    def _value(self, unit: TorchUnit, group: Mapping[str, Any], key: str, value: object) -> object:
        adapter = self._adapter
        param = shaped(unit.param)
        keys = adapter.param_keys(param, group) if isinstance(value, torch.Tensor) else ()

        def found(value: object, key: str) -> object:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            return LoadedState(unit, key, value, group, key in keys, adapter.steps_itself)

        return each_value(value, found, key)

    def _places(
        self, groups: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[TorchUnit, str, Mapping[str, Any], Any]]:
        """Each parameter once, its name for messages, its new options, its name in the dict."""
        seen: set[torch.Tensor] = set()
        for index, (own, group) in enumerate(
            zip(self._optimizer.param_groups, groups, strict=True)
        ):
            for position, (param, number) in enumerate(
                zip(own["params"], group["params"], strict=True)
            ):
                if param not in seen:
                    seen.add(param)
                    where = owner_name(self._optimizer, index, position)
                    yield UpdateUnit(param, index, 0, ()), where, options[index], number

    def _complete(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The groups that native makes of these: its ``__setstate__`` knows options of old files.

        Called on an object that is thrown away.
        """
        blank = self._kind.__new__(self._kind)
        own = vars(self._optimizer)
        vars(blank).update({key: own[key] for key in own.keys() - _NOT_COPIED})
        loaded = [
            {**group, "params": mine["params"]}
            for mine, group in zip(self._optimizer.param_groups, groups, strict=True)
        ]
        self._kind.__setstate__(blank, {"state": defaultdict(dict), "param_groups": loaded})
        return blank.param_groups

    # Groups.

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        own = self._optimizer.param_groups
        if len(groups) != len(own):
            raise StateDictError(
                f"load_state_dict: the state dict has a different number of parameter groups: "
                f"{len(groups)}, and this {self._adapter.supports()} {len(own)}. Make the "
                f"optimizer with the groups that it had when it was saved, or add_param_group() "
                f"before loading."
            )
        for index, (mine, group) in enumerate(zip(own, groups, strict=True)):
            if len(mine["params"]) != len(group["params"]):
                raise StateDictError(
                    f"load_state_dict: param group {index} of the state dict has "
                    f"{len(group['params'])} parameters, and that of this "
                    f"{self._adapter.supports()} {len(mine['params'])}. Give the optimizer the "
                    f"parameters that it had when it was saved."
                )
            self._check_order(index, mine.get("param_names"), group.get("param_names"))
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        params = list(chain.from_iterable(group["params"] for group in own))
        self._check_ties(numbers, params)

    def _check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for index, group in enumerate(groups):
            where = f"param group {index} of the state dict"
            try:
                self._adapter.validate_group(group, where)
                self._adapter.plan_options(group)
                self._adapter.state_keys(group)
            except UnsupportedOptionError as error:
                raise StateDictError(
                    f"load_state_dict: options come from the state dict, as natively, and those "
                    f"of this one cannot be combined with swapping. Change them in "
                    f"state_dict['param_groups'][{index}] before loading. ({error})"
                ) from error
            except KeyError as error:
                raise StateDictError(
                    f"load_state_dict: {where} has no option {error}, which a "
                    f"{self._adapter.supports()} needs; it has {', '.join(group)}. Add it to "
                    f"state_dict['param_groups'][{index}] before loading."
                ) from error

    @staticmethod
    def _check_order(index: int, mine: Sequence[str] | None, saved: Sequence[str] | None) -> None:
        """Names do not matter natively; the same names in another order are a mistake."""
        if mine is None or saved is None or list(mine) == list(saved):
            return
        if sorted(mine) == sorted(saved):
            at = next(i for i, (a, b) in enumerate(zip(mine, saved, strict=True)) if a != b)
            raise StateDictError(
                f"load_state_dict: param group {index} has the same parameters as in the state "
                f"dict in a different order: its parameter {at} is {mine[at]!r}, and that of the "
                f"state dict {saved[at]!r}. States are matched by position; give the optimizer "
                f"its parameters in the order in which they were saved."
            )

    @staticmethod
    def _check_ties(numbers: Sequence[object], params: Sequence[torch.Tensor]) -> None:
        if len(set(numbers)) != len(set(params)):
            raise StateDictError(
                f"load_state_dict: the state dict's groups name {len(set(numbers))} different "
                f"parameters, and the optimizer has {len(set(params))}. A parameter that was "
                f"listed twice when it was saved must be so when it is loaded."
            )

    # States.

    def _check_entry(
        self, param: torch.Tensor, where: str, group: Mapping[str, Any], entry: Mapping[str, Any]
    ) -> None:
        if not entry:
            return  # No gradient yet.
        param = shaped(param)
        required = self._adapter.required_keys(param, group)
        missing = [key for key in required if key not in entry]
        if missing:
            raise StateDictError(
                f"load_state_dict: the state of {where} lacks {', '.join(map(repr, missing))}; it "
                f"has {', '.join(map(repr, entry))}. A {self._adapter.supports()} with these "
                f"options needs all of them, or no state for a parameter without a gradient yet."
            )
        for key in self._adapter.param_keys(param, group):
            if key in required or entry.get(key) is not None:
                self._check_state(param, key, f"{key} of {where}", entry[key])
        for key in self._adapter.counter_keys():
            value = entry[key]
            single = isinstance(value, torch.Tensor) and local_of(value).numel() == 1
            if not single and not isinstance(value, (int, float)):
                raise StateDictError(
                    f"load_state_dict: {key} of {where} is {_what(value)}; a tensor with one "
                    f"element, or a number, is accepted."
                )

    def _check_state(self, param: torch.Tensor, key: str, what: str, value: object) -> None:
        like = self._adapter.template(param, key) if self._adapter.steps_itself else param
        wanted = f"a dense tensor of shape {tuple(like.shape)}"
        layouts = {torch.strided, *(_SPARSE if self._adapter.sparse_gradients else ())}
        if not isinstance(value, torch.Tensor) or local_of(value).layout not in layouts:
            raise StateDictError(
                f"load_state_dict: {what} is {_what(value)}; {wanted} is accepted."
            )
        local, own = local_of(value), local_of(like)
        if is_sharded(value) and value.shape != like.shape:
            raise StateDictError(
                f"load_state_dict: {what} has the global shape {tuple(value.shape)}; {wanted} is "
                f"accepted. Are the parameters in the order in which they were saved?"
            )
        # Its own step takes states in any placement; kernels on shards want the parameter's.
        placed_freely = is_sharded(value) and self._adapter.steps_itself
        if local.shape != own.shape and not placed_freely:
            hint = (
                "The parameter is sharded: load through torch.distributed.checkpoint "
                "(set_optimizer_state_dict), which cuts states as parameters are cut."
                if is_sharded(param)
                else "Are the parameters in the order in which they were saved?"
            )
            raise StateDictError(
                f"load_state_dict: {what} has the shape {tuple(local.shape)}, and its parameter "
                f"{tuple(own.shape)}. {hint}"
            )
        if local.is_meta:
            raise StateDictError(
                f"load_state_dict: {what} is on the meta device and has no values. Load the "
                f"state dict from its file, or with assign, before giving it to the optimizer."
            )


def _what(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, layout {value.layout}"
    return f"a {type(value).__name__}"
