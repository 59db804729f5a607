# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's AdamW (``hyper_parallel.core.optimizer.adamw.AdamW``).

It is on no package index, so it is matched by name and never imported: whoever has such an
optimizer has imported its module. Unlike torch's, it counts steps per group, as a Python int, also
in a step in which the group has no gradient; and it makes states like the gradient.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from swap_core import SwapOptimizerConfig, UnsupportedOptimizerError
from swap_torch.adam import TorchAdamBaseAdapter, hyper_parameters
from swap_torch.adapter import Group, Kernel, UpdateCall
from swap_torch.matching import qualified_name
from swap_torch.sharding import local_of

__all__ = ["TorchHyperAdamWAdapter"]

_NAME = "hyper_parallel.core.optimizer.adamw.AdamW"
_FUNCTION_PARAMETERS = [
    *("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "step"),
    *("amsgrad", "beta1", "beta2", "lr", "weight_decay", "eps", "maximize"),
]


@final
class TorchHyperAdamWAdapter(TorchAdamBaseAdapter):
    """HyperParallel's AdamW, through the module's own function ``adamw``."""

    @classmethod
    def supports(cls) -> str:
        """The class's name for messages."""
        return _NAME

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Just that class: a subclass may step differently."""
        return qualified_name(type(optimizer)) == _NAME and isinstance(
            optimizer, torch.optim.Optimizer
        )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._adamw = _module_function()

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Also check that the module's function takes what it is going to be given."""
        found = list(inspect.signature(self._adamw).parameters)
        if found != _FUNCTION_PARAMETERS:
            raise UnsupportedOptimizerError(
                f"swap_optimizer: the function adamw beside {_NAME} takes ({', '.join(found)}); "
                f"known is ({', '.join(_FUNCTION_PARAMETERS)}). This HyperParallel is newer or "
                f"older than what this swap-torch knows."
            )
        super().validate(config)

    def validate_group(self, group: Mapping[str, Any], where: str) -> None:
        """Every combination of its options can swap."""

    def counter_keys(self) -> tuple[str, ...]:
        """None per parameter: the counter is the group's."""
        return ()

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """States are like the gradient, as natively.

        Not if its placement is another than the parameter's: the update is done in the latter.
        """
        grad = param.grad
        if grad is None or local_of(grad).shape != local_of(param).shape:
            return param
        return grad

    def new_counters(self, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """None."""
        return {}

    def check_newborn(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Nothing: its kernel speaks for itself."""

    def plan_options(self, group: Mapping[str, Any]) -> object:
        """AMSGrad has one more state."""
        return group["amsgrad"]

    def kernel(self, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> Kernel:
        """Always the fused kernel."""
        return Kernel(fused=True, foreach=False, has_complex=False)

    def begin_group(self, group: Group) -> None:
        """Advance the group's counter."""
        group["step"] = (group.get("step") or 0) + 1

    def update(self, group: Group, call: UpdateCall, grads: list[torch.Tensor]) -> None:
        """Call the module's function with the group's counter as the one step of all."""
        states = call.states
        self._adamw(
            call.params,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            states.get("max_exp_avg_sq", []),
            group["step"],
            **hyper_parameters(group),
        )


def _module_function() -> Callable[..., None]:
    function = vars(sys.modules[_NAME.rpartition(".")[0]]).get("adamw")
    if not callable(function):
        raise UnsupportedOptimizerError(
            f"swap_optimizer: the module of {_NAME} has no function adamw, which swapping calls "
            f"batch by batch. This HyperParallel is newer or older than what this swap-torch knows."
        )
    result: Callable[..., None] = function
    return result
