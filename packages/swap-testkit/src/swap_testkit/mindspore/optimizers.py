# SPDX-License-Identifier: Apache-2.0
"""The optimizers of the scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn

from swap_core import SwapOptimizerConfig
from swap_testkit.mindspore.mindformers import adamw_module, installed_folder, use_fused_standin
from swap_testkit.mindspore.trainer import OptimizerFactory

__all__ = ["OPTIMIZERS", "Kind", "installed_optimizers"]


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer, and in which ways it can swap."""

    make: OptimizerFactory
    mindformers: bool = False
    """Whether it needs MindFormers: it packs, and has fp32 masters of half-precision parameters."""

    def configs(self, config: SwapOptimizerConfig) -> Sequence[SwapOptimizerConfig]:
        """What to compare with: for ``packed_swap=None`` every way that there is."""
        if not self.mindformers:
            return [config]
        ways = [True, False] if config.packed_swap is None else [config.packed_swap]
        return [replace(config, packed_swap=way, include_master_params=True) for way in ways]

    def dtype_of(self, param: Parameter) -> Any:  # noqa: ANN401  # MindSpore's, untyped
        """In which dtype the optimizer gets a parameter."""
        return ms.bfloat16 if self.mindformers and len(param.shape) > 1 else ms.float32


def _mindformers(params: Any, **options: Any) -> nn.Optimizer:  # noqa: ANN401
    on_card = ms.get_context("device_target") == "Ascend"
    module = import_module("mindformers.pynative.optimizer.adamw") if on_card else _standin()
    optimizer = module.AdamW(params, learning_rate=1e-2, weight_decay=0.1, **options)
    if options.get("enable_fused_opt") and not on_card:
        use_fused_standin(optimizer)
    return optimizer


_standin = cache(adamw_module)

OPTIMIZERS: dict[str, Kind] = {
    "adam": Kind(lambda params: nn.Adam(params, 1e-2)),
    "adam-nesterov": Kind(lambda params: nn.Adam(params, 1e-2, use_nesterov=True)),
    "adam-amsgrad": Kind(lambda params: nn.Adam(params, 1e-2, use_amsgrad=True)),
    "adam-weight-decay": Kind(lambda params: nn.AdamWeightDecay(params, 1e-2, weight_decay=0.1)),
    "mindformers-adamw": Kind(_mindformers, mindformers=True),
    "mindformers-adamw-fused": Kind(
        partial(_mindformers, enable_fused_opt=True, amsgrad=True), mindformers=True
    ),
}


def installed_optimizers() -> list[str]:
    """Those that can be made here."""
    try:
        installed_folder()
        import_module("swap_mindformers")
    except ImportError:
        return [name for name, kind in OPTIMIZERS.items() if not kind.mindformers]
    return list(OPTIMIZERS)
