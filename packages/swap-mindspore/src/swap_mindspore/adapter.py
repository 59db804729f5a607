# SPDX-License-Identifier: Apache-2.0
"""What the MindSpore engine needs of an optimizer, and the objects that travel through a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias
from weakref import ref

from mindspore import Parameter, Tensor, nn

from swap_core import OptimizerSwapAdapter, SwapInternalError, UpdateUnit
from swap_mindspore.sharding import local_of

__all__ = ["Member", "MindSporeStep", "MindSporeSwapAdapter", "MindSporeUnit", "UpdateCall"]

MindSporeUnit: TypeAlias = UpdateUnit[Parameter]


@dataclass(slots=True)
class MindSporeStep:
    """What one call of the optimizer works on."""

    gradients: tuple[Tensor, ...]
    """One for each parameter, in the optimizer's order; of a sharded one this rank's part."""
    lr: Any
    """What ``get_lr()`` gave: a scalar Tensor, or a tuple with one for each parameter."""
    weight_decay: Any
    """What ``get_weight_decay()`` gave: the same, or a number."""
    begun: bool = field(default=False)
    """Whether what native does once per update, such as counting, is done."""


class Member(NamedTuple):
    """One parameter in a batch."""

    position: int
    """Its place in the optimizer."""
    states: Mapping[str, Tensor]
    """Its states by key: device tensors, valid only while the batch is on the device, and the
    optimizer's own Parameters for those that stay."""


class UpdateCall(NamedTuple):
    """The parameters that are updated together, in order."""

    members: tuple[Member, ...]


class MindSporeSwapAdapter(OptimizerSwapAdapter[Parameter, MindSporeStep, UpdateCall]):
    """One kind of MindSpore optimizer.

    Args:
        optimizer: The optimizer. Not kept alive: it owns the adapter.
    """

    def __init__(self, optimizer: nn.Optimizer) -> None:
        self._optimizer = ref(optimizer)

    @property
    def optimizer(self) -> nn.Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise SwapInternalError("an adapter outlived its optimizer")
        return optimizer

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters that are updated, in the optimizer's order."""
        return tuple(self.optimizer.parameters)

    def local_parameter(self, index: int) -> Tensor:
        """This rank's shard of one parameter: the parameter itself, unless it is a DTensor."""
        return local_of(self.optimizer.parameters[index])

    packed_by_default: ClassVar[bool] = False
    """What ``packed_swap=None`` means."""

    borrowers: ClassVar[Mapping[str, Collection[str]]] = {}
    """Methods of the optimizer that compute with states outside an update, and the keys of those
    that must be on the device meanwhile."""

    @abstractmethod
    def states(self) -> Mapping[str, Sequence[Parameter | None]]:
        """For each state key the states of all parameters, in order; None: it has none."""

    def signature(self) -> object:
        """What decides which parameters are updated. If it changes, batches are made anew."""
        return None

    @abstractmethod
    def read_hyper_parameters(self, gradients: tuple[Tensor, ...]) -> MindSporeStep:
        """Evaluate lr and weight decay for this update. Changes nothing."""

    @abstractmethod
    def check_gradient(self, index: int, gradient: Tensor) -> None:
        """Refuse what native refuses of the gradient of one parameter, in the same shape as it."""

    @abstractmethod
    def begin(self, step: MindSporeStep) -> None:
        """Do what native does once per update before any parameter, such as counting."""

    @abstractmethod
    def update(self, step: MindSporeStep, member: Member) -> None:
        """Update one parameter and its states in place."""

    def prepare_step(self, gradients: Sequence[Tensor] = ()) -> MindSporeStep:
        """Check the gradients, and read what decides this update.

        Raises:
            ValueError: not one gradient per parameter, or one that is None or has another shape.
            TypeError: a gradient is no dense Tensor, or of a dtype that native refuses.
        """
        params = self.parameters
        if not isinstance(gradients, tuple | list) or len(gradients) != len(params):
            found = (
                f"{len(gradients)} gradients"
                if isinstance(gradients, tuple | list)
                else f"a {type(gradients).__name__}"
            )
            raise ValueError(
                f"{self.supports()} has {len(params)} parameters and got {found}. Give one "
                f"gradient per parameter, in the order of optimizer.parameters, as "
                f"value_and_grad(..., weights=optimizer.parameters) returns them. Nothing was "
                f"updated."
            )
        shards = tuple(map(local_of, gradients))
        for index, (param, gradient) in enumerate(zip(params, shards, strict=True)):
            self._check(index, param, gradient)
        return self.read_hyper_parameters(shards)

    def iter_update_units(self, step: MindSporeStep) -> Iterable[MindSporeUnit]:
        """Give one unit for each parameter, without its slots."""
        for index, param in enumerate(self.parameters):
            yield UpdateUnit(param, index, index, ())

    def step_batch(self, step: MindSporeStep, call: UpdateCall) -> None:
        """Update the members of ``call``; before the first batch, count."""
        self._begin_once(step)
        for member in call.members:
            self.update(step, member)

    def finish_step(self, step: MindSporeStep) -> None:
        """Count, if no batch did."""
        self._begin_once(step)

    def _begin_once(self, step: MindSporeStep) -> None:
        if not step.begun:
            step.begun = True
            self.begin(step)

    def _check(self, index: int, param: Parameter, gradient: object) -> None:
        where = f"the gradient of parameter {index} ({param.name})"
        if gradient is None:
            raise ValueError(
                f"{self.supports()}: {where} is None, which the native optimizer does not take "
                f"either. Leave parameters without gradients out of the optimizer "
                f"(net.trainable_params()). Nothing was updated."
            )
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"{self.supports()}: {where} is a {type(gradient).__name__}; only dense Tensors "
                f"are supported. Make it dense (sparse=False on the embedding). Nothing was "
                f"updated."
            )
        expected = local_of(param).shape
        if gradient.shape != expected:
            raise ValueError(
                f"{self.supports()}: {where} has shape {gradient.shape}, but the parameter has "
                f"{expected}. Nothing was updated."
            )
        self.check_gradient(index, gradient)
