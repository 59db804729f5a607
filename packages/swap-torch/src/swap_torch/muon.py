# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon.

Its Newton-Schulz iteration sees whole matrices: sharded parameters stay DTensors in the update,
whose dispatch gathers and reduces. So updates communicate, in parameter order in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from swap_torch.per_parameter import PerParameterAdapter

__all__ = ["TorchMuonAdapter"]


@final
class TorchMuonAdapter(PerParameterAdapter):
    """torch.optim.Muon (https://kellerjordan.github.io/posts/muon/)."""

    optimizer_class = torch.optim.Muon
    state_names = ("momentum_buffer",)
    made_at_once = False

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """The momentum is like the gradient."""
        return param if param.grad is None else param.grad

    def check_newborn(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """No complex numbers, as natively."""
        if param.is_complex():
            raise RuntimeError("Muon does not support complex parameters")
