# SPDX-License-Identifier: Apache-2.0
"""torch's other optimizers, each with its own step on each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import optim
from torch.optim.optimizer import _default_to_fused_or_foreach

from swap_torch.adapter import Kernel
from swap_torch.fillers import Filler, Kind, Oddity, fillers_for, kind_of
from swap_torch.per_parameter import PerParameterAdapter
from swap_torch.stand_in import PartStep

__all__ = [
    "TorchASGDAdapter",
    "TorchAdadeltaAdapter",
    "TorchAdafactorAdapter",
    "TorchAdagradAdapter",
    "TorchAdamaxAdapter",
    "TorchNAdamAdapter",
    "TorchNativePartAdapter",
    "TorchRAdamAdapter",
    "TorchRMSpropAdapter",
    "TorchRpropAdapter",
    "TorchSGDAdapter",
]


class TorchNativePartAdapter(PerParameterAdapter):
    """What torch's own classes have in common."""

    counter_names: ClassVar[tuple[str, ...]] = ("step",)

    def kernel(self, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> Kernel:
        """What foreach=None means for these parameters of ``group``, all of them."""
        _, foreach = _default_to_fused_or_foreach(list(params), False, use_fused=False)
        return Kernel(fused=False, foreach=foreach, has_complex=False)

    def same_for_all(self, group: Mapping[str, Any], kernel: Kernel) -> Mapping[str, Any]:
        """A for-loop for every part if one parameter of an odd type means that for the group.

        torch looks at the types and devices of the list that it is given, so asked for a part of
        the group it might choose foreach.
        """
        undecided = group.get("foreach", False) is None and not group.get("fused")
        return {"foreach": False} if undecided and not kernel.foreach else {}

    def prepare_step(self) -> PartStep:
        """Also find what is odd in a group, if torch may look at all of it; see [Note: fillers]."""
        step = super().prepare_step()
        if not self.sparse_gradients:
            return step
        grads = iter(step.grads)
        for index, (members, mask) in enumerate(zip(step.params, step.masks, strict=True)):
            group = step.groups[index]
            active = [(p, next(grads)) for p, given in zip(members, mask, strict=True) if given]
            if group.get("foreach") is not False and not group.get("fused"):
                step.odd[index] = self.oddities(group, active)
        return step

    def oddities(
        self, group: Mapping[str, Any], active: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[Oddity, set[Kind]]:
        """The kinds of which one parameter is odd, of parameters with their gradients."""
        return {"sparse": {kind_of(param) for param, grad in active if grad.is_sparse}}


@final
class TorchSGDAdapter(TorchNativePartAdapter):
    """torch.optim.SGD. The momentum begins as the first gradient, so not with zeros."""

    optimizer_class = optim.SGD
    state_names = ("momentum_buffer",)
    counter_names = ()
    made_at_once = False
    sparse_gradients = True

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """One buffer with momentum."""
        return self.state_names if group["momentum"] else ()

    def oddities(
        self, group: Mapping[str, Any], active: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[Oddity, set[Kind]]:
        """Also those of which one has no momentum yet."""
        odd = super().oddities(group, active)
        if group["momentum"]:
            state = vars(self.optimizer)["state"]
            odd["new"] = {
                kind_of(param)
                for param, _ in active
                if state.get(param, {}).get("momentum_buffer") is None
            }
        return odd

    def fillers(
        self, step: PartStep, index: int, params: Sequence[torch.Tensor]
    ) -> Sequence[Filler]:
        """Without momentum, or with a sparse gradient, as the group has them."""
        momentum = {"momentum_buffer": True} if step.groups[index]["momentum"] else {}
        return fillers_for(params, step.odd.get(index, {}), momentum)

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """The buffer is a copy of the gradient."""
        return param if param.grad is None else param.grad


@final
class TorchNAdamAdapter(TorchNativePartAdapter):
    """torch.optim.NAdam (https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ)."""

    optimizer_class = optim.NAdam
    state_names = ("exp_avg", "exp_avg_sq")
    counter_names = ("step", "mu_product")


@final
class TorchRAdamAdapter(TorchNativePartAdapter):
    """torch.optim.RAdam (https://arxiv.org/abs/1908.03265)."""

    optimizer_class = optim.RAdam
    state_names = ("exp_avg", "exp_avg_sq")


@final
class TorchAdagradAdapter(TorchNativePartAdapter):
    """torch.optim.Adagrad, which makes its states when it is made itself."""

    optimizer_class = optim.Adagrad
    state_names = ("sum",)
    sparse_gradients = True

    def fillers(
        self, step: PartStep, index: int, params: Sequence[torch.Tensor]
    ) -> Sequence[Filler]:
        """With a sparse gradient, if the group has one."""
        return fillers_for(
            params, step.odd.get(index, {}), {"sum": False}, torch.tensor(0.0, device="cpu")
        )


@final
class TorchRMSpropAdapter(TorchNativePartAdapter):
    """torch.optim.RMSprop."""

    optimizer_class = optim.RMSprop
    state_names = ("square_avg", "momentum_buffer", "grad_avg")

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """One more with momentum, and one more if centered."""
        momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


@final
class TorchAdamaxAdapter(TorchNativePartAdapter):
    """torch.optim.Adamax (https://arxiv.org/abs/1412.6980)."""

    optimizer_class = optim.Adamax
    state_names = ("exp_avg", "exp_inf")


@final
class TorchAdadeltaAdapter(TorchNativePartAdapter):
    """torch.optim.Adadelta (https://arxiv.org/abs/1212.5701)."""

    optimizer_class = optim.Adadelta
    state_names = ("square_avg", "acc_delta")


@final
class TorchASGDAdapter(TorchNativePartAdapter):
    """torch.optim.ASGD. Its counters are on the device."""

    optimizer_class = optim.ASGD
    state_names = ("ax",)
    counter_names = ("step", "eta", "mu")


@final
class TorchRpropAdapter(TorchNativePartAdapter):
    """torch.optim.Rprop."""

    optimizer_class = optim.Rprop
    state_names = ("prev", "step_size")

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """Step sizes are like the gradient."""
        return param if key == "prev" or param.grad is None else param.grad


@final
class TorchAdafactorAdapter(TorchNativePartAdapter):
    """torch.optim.Adafactor (https://arxiv.org/abs/1804.04235).

    A matrix has a row and a column of means, a vector has the second moment itself.
    """

    optimizer_class = optim.Adafactor
    state_names = ("row_var", "col_var", "variance")

    def param_keys(self, param: torch.Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """By the number of dimensions."""
        return ("row_var", "col_var") if param.dim() > 1 else ("variance",)

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """All are like the gradient, but for the dimension that was averaged."""
        like = param if param.grad is None else param.grad
        if key == "variance":
            return like
        shape = list(like.shape)
        shape[-1 if key == "row_var" else -2] = 1
        return like.detach().new_empty(shape, device="meta")

    def check_newborn(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """No complex numbers, as natively."""
        if param.is_complex():
            raise RuntimeError("Adafactor does not support complex parameters")
