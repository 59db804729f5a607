# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Adam and AdamW.

The arithmetic is torch's own: its functional :func:`torch.optim.adam.adam`, or the kernels that it
would call (see :mod:`swap_torch.kernels`), on one batch at a time: the same kernels in the same
order per element, hence the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch.optim.adam import adam
from torch.optim.optimizer import (
    _default_to_fused_or_foreach,
    _device_dtype_check_for_fused,
    _get_scalar_dtype,
)

from swap_core import SwapOptimizerConfig, UnknownStateKeyError, UnsupportedOptionError
from swap_torch.adapter import ActiveGroup, Group, Kernel, TorchStep, TorchSwapAdapter, UpdateCall
from swap_torch.kernels import AdamLists, AdamNumbers, AdamOptions, agrees, direct_adam
from swap_torch.matching import steps_as
from swap_torch.sharding import local_of

__all__ = [
    "TorchAdamBaseAdapter",
    "TorchNativeAdamAdapter",
    "TorchNativeAdamWAdapter",
    "hyper_parameters",
]


class TorchAdamBaseAdapter(TorchSwapAdapter):
    """What Adam, AdamW and HyperParallel's AdamW have in common."""

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse a config or a parameter group that does not fit this optimizer."""
        if config.include_master_params:
            raise UnsupportedOptionError(
                f"swap_optimizer: include_master_params=True is for MindFormers AdamW, which owns "
                f"fp32 master parameters; {self.supports()} has none. Leave it False."
            )
        for index, group in enumerate(self.optimizer.param_groups):
            self.validate_group(group, f"param group {index}")
        self._validate_keys(config)

    def _validate_keys(self, config: SwapOptimizerConfig) -> None:
        groups = self.optimizer.param_groups
        have = tuple(dict.fromkeys(key for group in groups for key in self.state_keys(group)))
        for key in config.state_keys or ():
            if key not in have:
                hint = " (it exists with amsgrad=True)" if key == "max_exp_avg_sq" else ""
                raise UnknownStateKeyError(
                    f"swap_optimizer: state_keys names {key!r}, which this {self.supports()} does "
                    f"not have{hint}. It has: {', '.join(have)}."
                )

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Both moments, and the maximum of the second with AMSGrad."""
        amsgrad = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *amsgrad)

    def step_batch(self, step: TorchStep, call: UpdateCall) -> None:
        """Update ``call.params`` in place."""
        self.begin_groups(step, call.group_index + 1)
        group = self.optimizer.param_groups[call.group_index]
        if call.group_index in step.decayed:
            group = {**group, "weight_decay": 0, "maximize": False}
        self.update(group, call, call.gradients_in(step))

    @abstractmethod
    def update(self, group: Group, call: UpdateCall, grads: list[torch.Tensor]) -> None:
        """Run the optimizer's arithmetic, with the hyper-parameters as they are in ``group``."""


class _TorchNativeAdapter(TorchAdamBaseAdapter):
    """torch's own two classes."""

    refused_options: tuple[str, ...]
    """Options that must not be True."""

    def validate_group(self, group: Mapping[str, Any], where: str) -> None:
        """Refuse options whose implementation cannot run batch by batch on host states."""
        for option in self.refused_options:
            if group[option]:
                raise UnsupportedOptionError(
                    f"swap_optimizer: {self.supports()} with {option}=True in {where} is not "
                    f"supported; {_INSTEAD[option]}."
                )

    def counter_keys(self) -> tuple[str, ...]:
        """One ``step`` per parameter."""
        return ("step",)

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """States are like the parameter."""
        return param

    def new_counters(self, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Make ``step`` as native does: on the parameter's device if fused, else on the CPU."""
        fused = group["fused"]
        dtype = _get_scalar_dtype(is_fused=fused)  # type: ignore[no-untyped-call]  # torch
        device = param.device if fused else torch.device("cpu")
        return {"step": torch.zeros((), dtype=dtype, device=device)}

    def check_newborn(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """The fused kernel wants real floating point on certain devices."""
        if group["fused"]:
            _device_dtype_check_for_fused(param)

    def plan_options(self, group: Mapping[str, Any]) -> object:
        """What :meth:`kernel`, :meth:`state_keys` and :meth:`validate_group` look at."""
        return (
            group["foreach"],
            group["fused"],
            group["amsgrad"],
            group["capturable"],
            group["differentiable"],
            isinstance(group["lr"], torch.Tensor),
        )

    def kernel(self, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> Kernel:
        """Choose as :func:`torch.optim.adam.adam` does, from all parameters of the group.

        It looks at the types and devices of the list it is given; asked batch by batch, one
        parameter of an odd type would change one batch and not the others.
        """
        fused, foreach = group["fused"], group["foreach"]
        if fused is None and foreach is None:
            _, foreach = _default_to_fused_or_foreach(list(params), False, use_fused=False)
            foreach = foreach and not isinstance(group["lr"], torch.Tensor)
        return Kernel(
            bool(fused), bool(foreach), any(local_of(param).is_complex() for param in params)
        )

    def before_reduction(
        self,
        step: TorchStep,
        group: ActiveGroup,
        params: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Add a coupled weight decay, as native does: to parts, which are reduced afterwards.

        The fused kernel adds it inside, to gradients that were reduced before.
        """
        options = self.optimizer.param_groups[group.group_index]
        decay, negate = options["weight_decay"], options["maximize"]
        if decay == 0 or options["decoupled_weight_decay"] or group.kernel.fused:
            return grads
        step.decayed.add(group.group_index)
        if group.kernel.foreach:
            signed = list(torch._foreach_neg(grads)) if negate else grads
            return list(torch._foreach_add(signed, list(params), alpha=decay))
        signed = [-grad if negate else grad for grad in grads]
        pairs = zip(signed, params, strict=True)
        return [grad.add(param, alpha=decay) for grad, param in pairs]

    def begin_group(self, group: Group) -> None:
        """Nothing: counters are per parameter, and the kernels advance them."""

    def update(self, group: Group, call: UpdateCall, grads: list[torch.Tensor]) -> None:
        """Call torch's kernels, or its functional where that has more to do than call them."""
        kernel, states = call.kernel, call.states
        maxima = states.get("max_exp_avg_sq", [])
        numbers = _numbers(group)
        direct = self._direct_options(group, call, numbers)
        if direct is not None:
            firsts, seconds, steps = states["exp_avg"], states["exp_avg_sq"], states["step"]
            lists = AdamLists(call.params, grads, firsts, seconds, maxima, steps, call.counters)
            direct_adam(lists, direct, numbers)
            return
        adam(
            call.params,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            # The complex path replaces items of this list by other views.
            list(maxima) if kernel.has_complex else maxima,
            states["step"],
            foreach=kernel.foreach,
            capturable=False,
            differentiable=False,
            fused=kernel.fused,
            grad_scale=vars(self.optimizer).get("grad_scale"),
            found_inf=vars(self.optimizer).get("found_inf"),
            has_complex=kernel.has_complex,
            decoupled_weight_decay=group["decoupled_weight_decay"],
            **hyper_parameters(group),
        )

    def _direct_options(
        self, group: Group, call: UpdateCall, numbers: AdamNumbers
    ) -> AdamOptions | None:
        """How to call the kernels directly; None if the functional is to be called."""
        kernel = call.kernel
        if not call.uniform or kernel.has_complex:
            return None
        # Only in a row has each parameter a counter of its own, which the loop relies on.
        if call.counters is None and not (kernel.fused or kernel.foreach):
            return None
        if any(isinstance(number, torch.Tensor) for number in numbers):
            return None
        if {"grad_scale", "found_inf"} & vars(self.optimizer).keys():
            return None
        options = AdamOptions(
            fused=kernel.fused,
            foreach=kernel.foreach,
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            decays=group["weight_decay"] != 0,
            decoupled=group["decoupled_weight_decay"],
        )
        param = call.params[0]
        return options if agrees(options, param.device, param.dtype) else None


@final
class TorchNativeAdamAdapter(_TorchNativeAdapter):
    """torch.optim.Adam (https://arxiv.org/abs/1412.6980)."""

    refused_options = ("foreach", "fused", "capturable", "differentiable")

    @classmethod
    def supports(cls) -> str:
        """The class's name for messages."""
        return "torch.optim.Adam"

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Adam, or a subclass with the same step, but not AdamW."""
        return (
            isinstance(optimizer, torch.optim.Adam)
            and not isinstance(optimizer, torch.optim.AdamW)
            and steps_as(optimizer, torch.optim.Adam)
        )


@final
class TorchNativeAdamWAdapter(_TorchNativeAdapter):
    """torch.optim.AdamW (https://arxiv.org/abs/1711.05101)."""

    refused_options = ("foreach", "capturable", "differentiable")

    @classmethod
    def supports(cls) -> str:
        """The class's name for messages."""
        return "torch.optim.AdamW"

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """AdamW, or a subclass with the same step."""
        return isinstance(optimizer, torch.optim.AdamW) and steps_as(optimizer, torch.optim.AdamW)


_INSTEAD = {
    "foreach": "leave foreach=None, which runs what native runs by default, or set foreach=False",
    "fused": "leave fused=None or set fused=False, or use AdamW, which supports fused=True",
    "capturable": "set capturable=False: a captured graph cannot hold the copies from host memory",
    "differentiable": "set differentiable=False: states that move cannot carry gradients",
}


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What the functions of all kinds of Adam take by name, as it is in ``group`` now."""
    return {**_numbers(group)._asdict(), "amsgrad": group["amsgrad"], "maximize": group["maximize"]}


def _numbers(group: Mapping[str, Any]) -> AdamNumbers:
    """The part of :func:`hyper_parameters` that are numbers, or tensors of one."""
    beta1, beta2 = group["betas"]
    return AdamNumbers(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
