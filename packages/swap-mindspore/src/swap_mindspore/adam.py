# SPDX-License-Identifier: Apache-2.0
"""nn.Adam and nn.AdamWeightDecay.

Natively ``construct`` is a compiled graph over all parameters. Here the same primitives run
eagerly, parameter by parameter and in the same order for each, which gives the same bits. All that
is done to a gradient first is done inside its batch too, so that no more than one parameter's
temporaries exist at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.optim import adam as native_adam
from mindspore.nn.optim import optimizer as native

from swap_core import (
    SwapOptimizerConfig,
    UnknownStateKeyError,
    UnsupportedOptionError,
    refuse_schedules,
)
from swap_mindspore.adapter import Member, MindSporeStep, MindSporeSwapAdapter

__all__ = [
    "MindSporeAdamBaseAdapter",
    "MindSporeNativeAdamAdapter",
    "MindSporeNativeAdamWAdapter",
]


class MindSporeAdamBaseAdapter(MindSporeSwapAdapter):
    """What all Adam-like optimizers of MindSpore have in common."""

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse a config or an option that cannot be combined with swapping."""
        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            raise UnsupportedOptionError(
                "swap_optimizer: graph mode is not supported, since memory is taken and given "
                "back between the batches of an update, which a compiled graph cannot do. Call "
                "mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first; forward and backward "
                "may still be compiled with @jit."
            )
        if self.optimizer.use_parallel:
            raise UnsupportedOptionError(
                f"swap_optimizer: {self.supports()} under enable_parallel_optimizer=True "
                f"(use_parallel) is not supported, since each rank then updates only some of the "
                f"parameters. Shard the parameters instead, or switch it off."
            )
        if config.allow_closure:
            raise UnsupportedOptionError(
                "swap_optimizer: allow_closure=True is for torch; MindSpore's optimizers take "
                "gradients. Leave it False."
            )
        refuse_schedules(config, self.supports())
        self._validate_keys(config)

    def _validate_keys(self, config: SwapOptimizerConfig) -> None:
        have = tuple(self.states())
        for key in config.state_keys or ():
            if key not in have:
                raise UnknownStateKeyError(
                    f"swap_optimizer: state_keys names {key!r}, which this {self.supports()} does "
                    f"not have. It has: {', '.join(have)}."
                )

    def learning_rate(self, step: MindSporeStep, index: int) -> Tensor:
        """The learning rate of one parameter."""
        return step.lr[index] if self.optimizer.is_group_lr else step.lr

    def weight_decay(self, step: MindSporeStep, index: int) -> Tensor:
        """The weight decay of one parameter."""
        return step.weight_decay[index] if self.optimizer.is_group else step.weight_decay


class _NativeAdapter(MindSporeAdamBaseAdapter):
    """mindspore.nn's own two classes."""

    native_class: type[nn.Optimizer]

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Tell whether it is of this class and runs its update."""
        return (
            isinstance(optimizer, cls.native_class)
            and type(optimizer).construct is cls.native_class.construct
        )

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse a config or an option that cannot be combined with swapping."""
        if config.packed_swap:
            raise UnsupportedOptionError(
                f"swap_optimizer: packed_swap=True is not supported for {self.supports()}, whose "
                f"kernels take whole tensors. Leave it None or say False: state by state."
            )
        if config.include_master_params:
            raise UnsupportedOptionError(
                f"swap_optimizer: include_master_params=True is for MindFormers AdamW, which owns "
                f"fp32 master parameters; {self.supports()} has none. Leave it False."
            )
        super().validate(config)

    def read_hyper_parameters(self, gradients: tuple[Tensor, ...]) -> MindSporeStep:
        """Evaluate schedules at the present ``global_step``, as native does before counting."""
        weight_decay = self.optimizer.get_weight_decay()
        return MindSporeStep(gradients, self.optimizer.get_lr(), weight_decay)

    def begin(self, step: MindSporeStep) -> None:
        """Count."""
        optimizer = self.optimizer
        optimizer.assignadd(optimizer.global_step, optimizer.global_step_increase_tensor)


@final
class MindSporeNativeAdamAdapter(_NativeAdapter):
    """``mindspore.nn.Adam``."""

    native_class = nn.Adam

    @classmethod
    def supports(cls) -> str:
        """Name the optimizer."""
        return "mindspore.nn.Adam"

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse the two options that move states or updates elsewhere, too."""
        for option in ("use_lazy", "use_offload"):
            if getattr(self.optimizer, option):
                raise UnsupportedOptionError(
                    f"swap_optimizer: {self.supports()} with {option}=True is not supported; "
                    f"leave it False."
                )
        super().validate(config)

    def states(self) -> Mapping[str, Sequence[Parameter]]:
        """Both moments, and the maximum of the second with AMSGrad."""
        optimizer = self.optimizer
        states = {"exp_avg": optimizer.moment1, "exp_avg_sq": optimizer.moment2}
        if optimizer.use_amsgrad:
            states["max_exp_avg_sq"] = optimizer.vhat
        return states

    def check_gradient(self, index: int, gradient: Tensor) -> None:
        """Of the dtype of the parameter; without weight decay the kernel also widens."""
        param = self.parameters[index]
        widened = param.dtype == ms.float32 and not self.optimizer.exec_weight_decay
        if gradient.dtype != param.dtype and not widened:
            raise TypeError(
                f"{self.supports()}: the gradient of parameter {index} ({param.name}) is "
                f"{gradient.dtype}, but the parameter is {param.dtype}. Cast the gradient. "
                f"Nothing was updated."
            )

    def begin(self, step: MindSporeStep) -> None:
        """Count, and advance the powers of both betas."""
        super().begin(step)
        optimizer = self.optimizer
        optimizer.beta1_power = optimizer.beta1_power * optimizer.beta1
        optimizer.beta2_power = optimizer.beta2_power * optimizer.beta2

    def update(self, step: MindSporeStep, member: Member) -> None:
        """Call the optimizer's primitive, which takes ``vhat`` after the moments with AMSGrad."""
        optimizer = self.optimizer
        optimizer.opt(
            self.local_parameter(member.position),
            *member.states.values(),
            optimizer.beta1_power,
            optimizer.beta2_power,
            self.learning_rate(step, member.position),
            optimizer.beta1,
            optimizer.beta2,
            optimizer.eps,
            self._prepared(step, member.position),
        )

    def _prepared(self, step: MindSporeStep, index: int) -> Tensor:
        """The gradient with weight decay, centralised and unscaled, in native's order."""
        optimizer = self.optimizer
        gradient = step.gradients[index]
        if optimizer.exec_weight_decay:
            gradient = native._tensor_apply_decay(
                self.weight_decay(step, index),
                optimizer.decay_flags[index],
                self.local_parameter(index),
                gradient,
            )
        if optimizer.is_group:
            flag = optimizer.grad_centralization_flags[index]
            gradient = native._tensor_apply_grad_centralization(flag, gradient)
        if optimizer.need_scale:
            gradient = native.tensor_grad_scale_with_tensor(optimizer.reciprocal_scale, gradient)
        return gradient


@final
class MindSporeNativeAdamWAdapter(_NativeAdapter):
    """``mindspore.nn.AdamWeightDecay``, with its fused primitive or without."""

    native_class = nn.AdamWeightDecay

    @classmethod
    def supports(cls) -> str:
        """Name the optimizer."""
        return "mindspore.nn.AdamWeightDecay"

    def states(self) -> Mapping[str, Sequence[Parameter]]:
        """Both moments."""
        optimizer = self.optimizer
        return {"exp_avg": optimizer.moments1, "exp_avg_sq": optimizer.moments2}

    def check_gradient(self, index: int, gradient: Tensor) -> None:
        """Any dtype: native casts."""

    def update(self, step: MindSporeStep, member: Member) -> None:
        """Call the fused primitive, or native's own composition of small ones."""
        optimizer = self.optimizer
        param = self.local_parameter(member.position)
        gradient = step.gradients[member.position]
        lr = self.learning_rate(step, member.position)
        weight_decay = self.weight_decay(step, member.position)
        decays = optimizer.decay_flags[member.position]
        betas = (optimizer.beta1, optimizer.beta2, optimizer.eps)
        moments = tuple(member.states.values())
        if optimizer.use_fused_opt:
            gradient = ops.cast(gradient, param.dtype)
            decay = weight_decay if decays else 0.0
            optimizer.fused_opt(param, *moments, lr, *betas, decay, gradient)
        else:
            native_adam._update_run_op(
                *betas, lr, weight_decay, param, *moments, gradient, decays, True
            )
