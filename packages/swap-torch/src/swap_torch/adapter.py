# SPDX-License-Identifier: Apache-2.0
"""What the torch engine needs of an optimizer, and the objects that travel through a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias
from weakref import ref

import torch

from swap_core import OptimizerSwapAdapter, SwapInternalError, UpdateUnit

__all__ = [
    "ActiveGroup",
    "Group",
    "Kernel",
    "TorchStep",
    "TorchSwapAdapter",
    "TorchUnit",
    "UpdateCall",
    "owner_name",
]

Group: TypeAlias = dict[str, Any]
"""A torch parameter group; its values are what the optimizer's author made them."""

TorchUnit: TypeAlias = UpdateUnit[torch.Tensor]


class Kernel(NamedTuple):
    """The implementation that native would choose for a whole group, and so for each batch."""

    fused: bool
    foreach: bool
    has_complex: bool


class ActiveGroup(NamedTuple):
    """The parameters of one group that have a gradient."""

    group_index: int
    """Which group of the optimizer."""
    kernel: Kernel
    members: slice
    """Where they are among all parameters that have a gradient."""


@dataclass(slots=True)
class TorchStep:
    """What one call of ``step()`` works on."""

    params: list[list[torch.Tensor]]
    """The ``params`` list of each group, the optimizer's own list objects."""
    masks: tuple[tuple[bool, ...], ...]
    """For each group, which of its parameters have a gradient."""
    options: tuple[object, ...]
    """What of the groups' options decides how a plan looks (not lr, betas and the like)."""
    grads: list[torch.Tensor]
    """The gradients in the order of groups and parameters; local ones once the plan is known."""
    groups_begun: int = field(default=0)
    """How many groups have done what they do once per step."""
    decayed: set[int] = field(default_factory=set)
    """Groups whose gradients have had their sign and weight decay applied already."""


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """One call of the optimizer's own arithmetic: parameters of one group, in order.

    Lists are bound once and used in every step; ``states`` holds device tensors, which are valid
    only while the batch is on the device.
    """

    group_index: int
    params: list[torch.Tensor]
    grads: tuple[int, ...] | slice
    """Where their gradients are in :attr:`TorchStep.grads`."""
    states: Mapping[str, list[torch.Tensor]]
    """For each key (counters too) the states of ``params``, in order."""
    kernel: Kernel
    uniform: bool
    """Whether all of ``params`` have one device and one dtype, and all counters are floats."""
    counters: torch.Tensor | None
    """One 1-D tensor over the counters of ``params``, if they lie side by side on the CPU."""

    def gradients_in(self, step: TorchStep) -> list[torch.Tensor]:
        """The gradients of ``params``, in order."""
        if isinstance(self.grads, slice):
            return step.grads[self.grads]
        return [step.grads[index] for index in self.grads]


_is_sparse = attrgetter("is_sparse")


class TorchSwapAdapter(OptimizerSwapAdapter[torch.Tensor, TorchStep, UpdateCall]):
    """One kind of torch optimizer.

    For an optimizer of your own derive from :class:`swap_torch.PerParameterAdapter`.

    Args:
        optimizer: The optimizer, whose ``param_groups`` and ``state`` are looked up anew in each
            step, since ``load_state_dict`` replaces both. Not kept alive: it owns the adapter, and
            its host memory must be free as soon as the user lets go of it.
    """

    steps_itself: ClassVar[bool] = False
    """Whether the optimizer's own ``step`` runs on each batch: then it makes its states itself, on
    parameters as they are (DTensors too), in the same order in every process."""
    sparse_gradients: ClassVar[bool] = False
    """Whether updates take sparse gradients; if not, ``step()`` refuses them before anything
    changes."""
    wrapper_states: ClassVar[frozenset[str]] = frozenset()
    """Tensor subclasses that states may be, by qualified name: each is a traceable wrapper, whose
    values are all in the plain tensors that its ``__tensor_flatten__`` names. They move together;
    states of other subclasses stay."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = ref(optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise SwapInternalError("an adapter outlived its optimizer")
        return optimizer

    @abstractmethod
    def validate_group(self, group: Mapping[str, Any], where: str) -> None:
        """Refuse a parameter group whose options cannot be combined with swapping.

        Args:
            group: The options, complete.
            where: Which group it is, in the words of messages.

        Raises:
            UnsupportedOptionError: naming the option, the group and what to use instead.
        """

    @abstractmethod
    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the tensor states that a parameter of ``group`` has."""

    def param_keys(self, param: torch.Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of :meth:`state_keys` that ``param`` has."""
        return self.state_keys(group)

    def required_keys(self, param: torch.Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """What an entry of a state dict for ``param`` must have."""
        return (*self.counter_keys(), *self.param_keys(param, group))

    @abstractmethod
    def counter_keys(self) -> tuple[str, ...]:
        """Names of per-parameter states that never swap, such as ``step``."""

    @abstractmethod
    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """The tensor whose like natively becomes the new state ``key`` of ``param``.

        ``param`` has a shape: an empty tensor stands in for one of a lazy module that has none.
        """

    @abstractmethod
    def new_counters(self, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The counters of a parameter that is updated for the first time."""

    @abstractmethod
    def check_newborn(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Raise what native raises before it makes the states of ``param``, if anything."""

    @abstractmethod
    def kernel(self, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> Kernel:
        """The implementation that native runs for these parameters of ``group``, all of them."""

    @abstractmethod
    def plan_options(self, group: Mapping[str, Any]) -> object:
        """The options of ``group`` that make a different plan when they change; hashable."""

    def prepare_step(self) -> TorchStep:
        """Collect the gradients.

        Raises:
            RuntimeError: a gradient is sparse, as natively, but before anything changed.
        """
        groups = self.optimizer.param_groups
        params: list[list[torch.Tensor]] = [group["params"] for group in groups]
        grads = [[param.grad for param in members] for members in params]
        step = TorchStep(
            params=params,
            masks=tuple([tuple([grad is not None for grad in group]) for group in grads]),
            options=tuple([self.plan_options(group) for group in groups]),
            grads=[grad for group in grads for grad in group if grad is not None],
        )
        if any(map(_is_sparse, step.grads)):
            self._check_sparse(step)
        return step

    def iter_update_units(self, step: TorchStep) -> Iterable[TorchUnit]:
        """Give one unit for each parameter with a gradient, without its slots."""
        grad_index = 0
        for group_index, (members, mask) in enumerate(zip(step.params, step.masks, strict=True)):
            for param, has_grad in zip(members, mask, strict=True):
                if has_grad:
                    yield UpdateUnit(param, group_index, grad_index, ())
                    grad_index += 1

    def before_reduction(
        self,
        step: TorchStep,
        group: ActiveGroup,
        params: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Do what native does to gradients while they have another placement than ``params``.

        Called when some gradient of the step is such, once for each group, before anything else.
        An optimizer that reads a gradient first together with a state need not do anything.

        Args:
            step: May be marked with what was done.
            group: Which group.
            params: Its parameters with gradients, DTensors among them.
            grads: Their gradients as they are; not to be changed in place.

        Returns:
            Gradients to be redistributed, in any placement.
        """
        return grads

    def finish_step(self, step: TorchStep) -> None:
        """Begin the groups that no batch began, such as those without gradients."""
        self.begin_groups(step, len(step.params))

    def begin_groups(self, step: TorchStep, count: int) -> None:
        """Do what the first ``count`` groups do once per step, each of them once, in order."""
        while step.groups_begun < count:
            self.begin_group(self.optimizer.param_groups[step.groups_begun])
            step.groups_begun += 1

    @abstractmethod
    def begin_group(self, group: Group) -> None:
        """Do what native does once per step and group, such as advancing the group's counter."""

    def _check_sparse(self, step: TorchStep) -> None:
        groups = self.optimizer.param_groups
        for unit in self.iter_update_units(step):
            fused = groups[unit.adapter_index].get("fused")
            if not step.grads[unit.grad_index].is_sparse or (self.sparse_gradients and not fused):
                continue
            members = step.params[unit.adapter_index]
            index = next(i for i, param in enumerate(members) if param is unit.param)
            raise RuntimeError(
                f"{self.supports()}{' with fused=True' if fused else ''} does not support sparse "
                f"gradients, but the gradient of "
                f"{owner_name(self.optimizer, unit.adapter_index, index)} is sparse. Make it dense "
                f"(sparse=False on the embedding), or use SparseAdam for that parameter. "
                f"Nothing was updated."
            )


def owner_name(optimizer: torch.optim.Optimizer, group_index: int, index: int) -> str:
    """Name a parameter in the words of messages: ``group 0, parameter 3 (layers.0.weight)``."""
    names = optimizer.param_groups[group_index].get("param_names")
    name = f" ({names[index]})" if names is not None else ""
    return f"group {group_index}, parameter {index}{name}"
