# SPDX-License-Identifier: Apache-2.0
"""MindFormers' PyNative AdamW.

Its update is a loop over parameters that calls one function for each, with everything that this
function needs as arguments. Here the same function is called, parameter by parameter, with the
staged states in the place of the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from swap_core import SwapOptimizerConfig, UnsupportedOptionError
from swap_mindformers.masters import Masters
from swap_mindformers.structure import NAME, module_of, native_class, verify
from swap_mindspore.adam import MindSporeAdamBaseAdapter
from swap_mindspore.adapter import Member, MindSporeStep, MindSporeUnit, UpdateCall
from swap_mindspore.sharding import local_of

__all__ = ["MindFormersAdamWAdapter"]

_MASTER = "master_param"


@dataclass(slots=True)
class MindFormersStep(MindSporeStep):
    """What one update works on, and what natively it computes once before all parameters."""

    count: Any = field(default=None)
    """The number of the update, as the fused kernel takes it."""
    corrections: tuple[Any, Any] = field(default=(None, None))
    """Of the bias of both moments."""


@final
class MindFormersAdamWAdapter(MindSporeAdamBaseAdapter):
    """``mindformers.pynative.optimizer.adamw.AdamW``, fused or not.

    Args:
        optimizer: The optimizer. Not kept alive: it owns the adapter.
    """

    packed_by_default = True
    borrowers = {  # noqa: RUF012  # a Mapping, and never changed
        "reload_main_params_from_model": (_MASTER,),
        "save_main_params_snapshot": (_MASTER,),
    }

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(optimizer)
        self._native = module_of(optimizer)
        verify(optimizer, self._native)
        self._masters = Masters(optimizer, self._native)

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Tell whether it is of this class and runs its update."""
        return native_class(optimizer) is not None

    @classmethod
    def supports(cls) -> str:
        """Name the optimizer."""
        return NAME

    def validate(self, config: SwapOptimizerConfig) -> None:
        """Refuse a config or an option that cannot be combined with swapping."""
        if self.optimizer.enable_cpu_offload:
            raise UnsupportedOptionError(
                f"swap_optimizer: {NAME} with enable_cpu_offload=True is not supported, since it "
                f"moves the states itself; leave it False."
            )
        selected = config.state_keys
        if selected is not None and _MASTER in selected and not config.include_master_params:
            raise UnsupportedOptionError(
                f"swap_optimizer: state_keys names {_MASTER!r}, which needs "
                f"include_master_params=True. Set it, or leave {_MASTER!r} out."
            )
        if selected is not None and _MASTER not in selected and config.include_master_params:
            raise UnsupportedOptionError(
                f"swap_optimizer: include_master_params=True, but state_keys={selected} leaves "
                f"{_MASTER!r} out. Name it there too, or leave include_master_params False."
            )
        super().validate(config)

    def states(self) -> Mapping[str, Sequence[Parameter | None]]:
        """Both moments, with AMSGrad in the fused kernel the maximum, and the fp32 masters.

        A parameter that is fp32 is its own master, and no state.
        """
        optimizer = self.optimizer
        states: dict[str, Sequence[Parameter | None]] = {
            "exp_avg": optimizer.exp_avg,
            "exp_avg_sq": optimizer.exp_avg_sq,
        }
        maxima = optimizer.max_exp_avg_sq
        # Without AMSGrad the fused kernel is given the second moment for this, too.
        if maxima is not None and maxima[0] is not optimizer.exp_avg_sq[0]:
            states["max_exp_avg_sq"] = maxima
        masters = [
            master if index in self._masters else None
            for index, master in enumerate(optimizer.fp32_params)
        ]
        if any(master is not None for master in masters):
            states[_MASTER] = masters
        return states

    def signature(self) -> object:
        """Which parameters the optimizer is told to update."""
        return self.optimizer.optim_filter

    def iter_update_units(self, step: MindSporeStep) -> Iterable[MindSporeUnit]:
        """Give one unit for each parameter that ``optim_filter`` lets through."""
        chosen = self.optimizer.optim_filter
        return [unit for unit in super().iter_update_units(step) if chosen[unit.adapter_index]]

    def check_gradient(self, index: int, gradient: Tensor) -> None:
        """Any dtype: native casts."""

    def read_hyper_parameters(self, gradients: tuple[Tensor, ...]) -> MindFormersStep:
        """Evaluate schedules at the present ``global_step``, and see whether masters are stale."""
        optimizer = self.optimizer
        decay, lr = optimizer.get_weight_decay(), optimizer.get_lr()
        # As numbers: that is what the native update computes with.
        lr = [float(x) for x in lr] if optimizer.is_group_lr else float(lr)
        decay = [float(x) for x in decay] if optimizer.is_group else float(decay)
        self._masters.warn_if_stale(optimizer)
        return MindFormersStep(gradients, lr, decay)

    def begin(self, step: MindSporeStep) -> None:
        """Count, and compute what follows from the count."""
        assert isinstance(step, MindFormersStep)
        optimizer = self.optimizer
        optimizer._increase_global_step()
        if optimizer.enable_fused_opt:
            step.count = self._native.op_cast(optimizer.global_step, mstype.int64)
        else:
            first = 1.0 - optimizer.beta1**optimizer.global_step
            step.corrections = (first, 1.0 - optimizer.beta2**optimizer.global_step)

    def step_batch(self, step: MindSporeStep, call: UpdateCall) -> None:
        """Update the members on each rank's own shards, as the native update does."""
        with self._native.SkipDTensorDispatch():
            super().step_batch(step, call)

    def update(self, step: MindSporeStep, member: Member) -> None:
        """Update one parameter: its master, if it has one, which then is rounded into it."""
        assert isinstance(step, MindFormersStep)
        index = member.position
        model_param = self.local_parameter(index)
        master = member.states.get(_MASTER)
        run = self._run_fused if self.optimizer.enable_fused_opt else self._run
        if master is None:
            run(step, member, model_param)
            return
        self._masters.note_updated(index)
        run(step, member, master)
        if master is not local_of(self.optimizer.fp32_params[index]):
            # It swaps, so it will be gone when the others are rounded.
            self._masters.sync(model_param, master, index)

    def finish_step(self, step: MindSporeStep) -> None:
        """Round the masters that do not swap into their parameters."""
        with self._native.SkipDTensorDispatch():
            super().finish_step(step)
            self._masters.sync_rest(self.optimizer)

    def _run(self, step: MindFormersStep, member: Member, param: Tensor) -> None:
        optimizer, index = self.optimizer, member.position
        self._native._run_adamw_opt(
            *(optimizer.beta1, optimizer.beta2, optimizer.eps),
            *(self.learning_rate(step, index), self.weight_decay(step, index)),
            *(param, step.gradients[index]),
            *(member.states["exp_avg"], member.states["exp_avg_sq"]),
            True,
            *step.corrections,
            optimizer.one_minus_beta2,
        )

    def _run_fused(self, step: MindFormersStep, member: Member, param: Tensor) -> None:
        optimizer, index = self.optimizer, member.position
        second = member.states["exp_avg_sq"]
        self._native._run_fused_adamw_opt(
            *(optimizer.fused_adamw_opt, optimizer.amsgrad, optimizer.maximize),
            *(optimizer.beta1_value, optimizer.beta2_value, optimizer.eps_value, step.count),
            *(self.learning_rate(step, index), self.weight_decay(step, index)),
            *(param, step.gradients[index], member.states["exp_avg"], second),
            member.states.get("max_exp_avg_sq", second),
        )
