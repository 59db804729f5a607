# SPDX-License-Identifier: Apache-2.0
"""What of torchtitan cannot be combined with swapping, refused before anything is built or changed.

Options of single optimizers are refused by :func:`swap_torch.swap_optimizer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from swap_core import UnsupportedOptimizerError, UnsupportedOptionError
from swap_torch.device import AnyTorchDevice
from swap_torch.finding import find_torch_adapter

__all__ = ["refuse_config", "refuse_container", "refuse_optimizers"]

_FAULT_TOLERANT = "TorchFTOptimizersContainer"
"""By name, since it is in an experiment of torchtitan, which may move or go."""


def refuse_container(base: type) -> None:
    """Refuse a container whose own ways do not fit.

    Raises:
        ValueError: naming it.
    """
    if any(each.__name__ == _FAULT_TOLERANT for each in base.__mro__):
        raise UnsupportedOptimizerError(
            f"optimizer.swap_optimizer: {base.__name__} (fault tolerance) is not supported: it "
            f"keeps one state dict and hands it out in later steps, while the state dict of a "
            f"swapped optimizer does not change any more. Use torchtitan's own container, or train "
            f"without swapping."
        )


def refuse_config(config: OptimizersContainer.Config) -> None:
    """Refuse options of a container's config, read before any optimizer is built.

    Raises:
        ValueError: naming the option, what was found, and what to use instead.
    """
    if config.implementation == "fused_opt_states_bf16":
        raise UnsupportedOptionError(
            "optimizer.swap_optimizer: optimizer.implementation='fused_opt_states_bf16' is not "
            "supported; use 'fused', which keeps states in the parameters' dtype, or 'for-loop'."
        )
    for group in config.param_groups:
        if group.optimizer_name == "DistMuon":
            raise UnsupportedOptimizerError(
                f"optimizer.swap_optimizer: optimizer_name='DistMuon' of the param group "
                f"{group.pattern!r} is not supported: its update redistributes momentum between "
                f"ranks by itself. Use Adam or AdamW for that group, or train without swapping."
            )


def refuse_optimizers(optimizers: Sequence[Optimizer], device: AnyTorchDevice | None) -> None:
    """Refuse what a container built, before any of it is wrapped.

    Raises:
        ValueError: an optimizer without an adapter, or parameters that are offloaded.
    """
    for optimizer in optimizers:
        try:
            find_torch_adapter(optimizer)
        except UnsupportedOptimizerError as error:
            raise UnsupportedOptimizerError(
                f"optimizer.swap_optimizer: this config builds {type(optimizer).__name__} for "
                f"{_some_names(optimizer)}. {error}"
            ) from error
        if device is None:
            _refuse_offloaded(optimizer)


def _refuse_offloaded(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            # FSDP's offload policy: the shards are on the CPU, the mesh is of accelerators.
            if isinstance(param, DTensor) and param.to_local().device.type == "cpu":
                if param.device_mesh.device_type == "cpu":
                    continue
                raise UnsupportedOptionError(
                    "optimizer.swap_optimizer: training.enable_cpu_offload is on, which keeps "
                    "parameters and states in host memory and updates them there; nothing is left "
                    "to swap. Leave one of the two off."
                )


def _some_names(optimizer: Optimizer) -> str:
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
