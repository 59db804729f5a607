# SPDX-License-Identifier: Apache-2.0
"""torchao's Adam and AdamW with quantized states.

torchao is matched by name and never imported: nobody can have one of its optimizers before its
module is there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast, final

import torch
from torch.optim import Optimizer

from swap_torch.per_parameter import PerParameterAdapter
from swap_torch.sharding import local_of, wrap_like

__all__ = ["TorchaoAdamAdapter"]

_MODULE = "torchao.optim.adam"
_NAMES = ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")


@final
class TorchaoAdamAdapter(PerParameterAdapter):
    """torchao.optim's Adam and AdamW with states of 8 bits, 4 bits and fp8.

    States of parameters that have at least 4096 local elements, a multiple of the block size, are
    quantized: codes, a scale for each block, and a table, which move together. Others are plain.
    """

    state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counter_names = ("step",)
    wrapper_states = frozenset(
        {
            "torchao.optim.subclass_8bit.OptimState8bit",
            "torchao.optim.subclass_4bit.OptimState4bit",
            "torchao.optim.subclass_fp8.OptimStateFp8",
        }
    )

    @classmethod
    def classes(cls) -> tuple[type[Optimizer], ...]:
        """The six public ones, if torchao's module is loaded."""
        module = sys.modules.get(_MODULE)
        known = {} if module is None else vars(module)
        return tuple(known[name] for name in _NAMES if name in known)

    @classmethod
    def supports(cls) -> str:
        """Their names."""
        return f"torchao.optim {', '.join(_NAMES)}"

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """One more with amsgrad."""
        return self.state_names if group.get("amsgrad") else self.state_names[:2]

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """What the optimizer itself would make for a parameter without values."""
        local = local_of(param)
        like = torch.empty(local.shape, dtype=local.dtype, device="meta")
        optimizer = cast("Any", self.optimizer)
        made: torch.Tensor = optimizer._new_buffer(like, key == "exp_avg")
        return wrap_like(param, made, state_exists=False)
