# SPDX-License-Identifier: Apache-2.0
"""Any optimizer that updates each parameter by itself: its own ``step``, batch by batch.

See [Note: its own step] in :mod:`swap_torch.stand_in`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from swap_core import (
    SwapInternalError,
    SwapOptimizerConfig,
    UnknownStateKeyError,
    UnsupportedOptimizerError,
    UnsupportedOptionError,
)
from swap_torch.adapter import Group, Kernel, TorchStep, TorchSwapAdapter, UpdateCall
from swap_torch.fillers import Filler
from swap_torch.matching import steps_as
from swap_torch.parts import Member, PartCall
from swap_torch.stand_in import PartStep, remember, step_part

__all__ = ["PerParameterAdapter"]


class PerParameterAdapter(TorchSwapAdapter):
    """Base of adapters for optimizers that update each parameter by itself.

    A subclass says which optimizer it is for and which states that has::

        class LionAdapter(PerParameterAdapter):
            optimizer_class = Lion
            state_names = ("exp_avg",)

    and is given to ``swap_optimizer(optimizer, adapter=LionAdapter)`` or registered as the entry
    point ``torch.lion`` of the group ``swap_core.adapters``. See docs/adapters.md, and
    :mod:`swap_testkit.torch.laws` for the tests that it must pass.

    The optimizer keeps its states in ``self.state[param]``, a dict for each parameter, reads
    gradients from ``param.grad``, and finds everything else in its groups and attributes.
    """

    steps_itself = True

    optimizer_class: ClassVar[type[Optimizer]]
    """The class, matched together with subclasses that do not override ``step``."""
    state_names: ClassVar[tuple[str, ...]]
    """Names of the states that may swap: those of the size of a parameter. All others (counters,
    numbers, None) stay as the optimizer makes them."""
    counter_names: ClassVar[tuple[str, ...]] = ()
    """Names of states that every parameter has and that never swap, mostly ``("step",)``."""
    made_at_once: ClassVar[bool] = True
    """Whether a parameter that has any state has all of them."""
    refused_options: ClassVar[Mapping[str, str]] = {
        "capturable": "set capturable=False: a captured graph cannot hold the copies from host "
        "memory",
        "differentiable": "set differentiable=False: states that move cannot carry gradients",
    }
    """Options of groups that must not be true, and what to use instead."""

    # For subclasses that know more.

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Which of ``state_names`` parameters of ``group`` have, with its options."""
        return self.state_names

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """A tensor with the dtype, shape and strides that a new state ``key`` will have.

        Only looked at; may be on the meta device. Default: ``param``.
        """
        return param

    def same_for_all(self, group: Mapping[str, Any], kernel: Kernel) -> Mapping[str, Any]:
        """Options that every part of a group is updated with, in place of the group's own."""
        return {}

    def fillers(
        self, step: PartStep, index: int, params: Sequence[torch.Tensor]
    ) -> Sequence[Filler]:
        """What is updated together with a part of group ``index``. See [Note: fillers]."""
        return ()

    # Finding and checking.

    @classmethod
    def classes(cls) -> tuple[type[Optimizer], ...]:
        """``optimizer_class``; an adapter that imports none may find it in ``sys.modules``."""
        return (cls.optimizer_class,)

    @classmethod
    def supports(cls) -> str:
        """The class's name for messages."""
        kind = cls.optimizer_class
        public = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
        return f"{public}.{kind.__qualname__}"

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Objects of the classes, and of subclasses with the same step."""
        return any(
            isinstance(optimizer, kind) and steps_as(optimizer, kind) for kind in cls.classes()
        )

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse a config or a parameter group that does not fit this optimizer."""
        if not isinstance(self.optimizer, self.classes()):
            raise UnsupportedOptimizerError(
                f"swap_optimizer: {type(self).__qualname__} is for {self.supports()}, and the "
                f"optimizer is a {type(self.optimizer).__qualname__}."
            )
        if config.include_master_params:
            raise UnsupportedOptionError(
                f"swap_optimizer: include_master_params=True is for MindFormers AdamW, which owns "
                f"fp32 master parameters; {self.supports()} has none. Leave it False."
            )
        for schedule in ("overlap_backward", "zigzag"):
            # Updates of shards may communicate, so their order is that of the parameters.
            if value := getattr(config, schedule):
                raise UnsupportedOptionError(
                    f"swap_optimizer: {schedule}={value!r} changes the order of updates, which "
                    f"{self.supports()} may not: its own step runs, and may communicate. Leave it "
                    f"False; prefetch='backward' is possible."
                )
        for index, group in enumerate(self.optimizer.param_groups):
            self.validate_group(group, f"param group {index}")
        groups = self.optimizer.param_groups
        have = tuple(dict.fromkeys(key for group in groups for key in self.state_keys(group)))
        for key in config.state_keys or ():
            if key not in have:
                raise UnknownStateKeyError(
                    f"swap_optimizer: state_keys names {key!r}, which this {self.supports()} does "
                    f"not have. It has: {', '.join(have) or 'none with these options'}."
                )

    def validate_group(self, group: Mapping[str, Any], where: str) -> None:
        """Refuse options whose update cannot run batch by batch."""
        for option, instead in self.refused_options.items():
            if group.get(option):
                raise UnsupportedOptionError(
                    f"swap_optimizer: {self.supports()} with {option}={group[option]} in {where} "
                    f"is not supported; {instead}."
                )

    # What the engine asks.

    def counter_keys(self) -> tuple[str, ...]:
        """``counter_names``."""
        return self.counter_names

    def required_keys(self, param: torch.Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """All keys, unless some may come later than others."""
        return super().required_keys(param, group) if self.made_at_once else ()

    def new_counters(self, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """None: the optimizer makes them."""
        return {}

    def check_newborn(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Nothing, unless a subclass knows what native refuses."""

    def kernel(self, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> Kernel:
        """Of no meaning here: the optimizer's own step chooses."""
        return Kernel(fused=False, foreach=True, has_complex=False)

    def plan_options(self, group: Mapping[str, Any]) -> object:
        """Which states there are, and what is refused."""
        options = (*self.refused_options, "foreach", "fused")
        return self.state_keys(group), *(bool(group.get(option)) for option in options)

    def begin_group(self, group: Group) -> None:
        """Nothing: the optimizer's own step does."""

    # The update.

    def prepare_step(self) -> PartStep:
        """Collect the gradients, and remember groups and attributes as they are."""
        return remember(super().prepare_step(), self.optimizer)

    def step_batch(self, step: TorchStep, call: UpdateCall) -> None:
        """Run the optimizer's own step on the parameters of ``call``."""
        if not isinstance(step, PartStep) or not isinstance(call, PartCall):
            raise SwapInternalError(f"{type(self).__qualname__} was given {call!r}")
        options = self.same_for_all(step.groups[call.group_index], call.kernel)
        fillers = self.fillers(step, call.group_index, call.params)
        step_part(self, step, call.group_index, call.members, options, fillers)

    def finish_step(self, step: TorchStep) -> None:
        """Run it for groups without gradients too: some count steps nevertheless."""
        if not isinstance(step, PartStep):
            raise SwapInternalError(f"{type(self).__qualname__} was given {step!r}")
        for index in range(len(step.groups)):
            if index not in step.stepped:
                members = [Member(param, {}) for param in step.params[index]]
                step_part(self, step, index, members, {})
