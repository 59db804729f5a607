# SPDX-License-Identifier: Apache-2.0
"""The MindSpore rows of the RFC's test list (7.2.2), as scenarios for a machine with cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RFC_ROWS", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: every scenario with every optimizer must be aligned."""

    scenarios: tuple[str, ...]
    optimizers: tuple[str, ...]
    nproc: int = 1

    def titles(self) -> Sequence[str]:
        """How the titles of its alignments begin."""
        suffix = f" on {self.nproc}" if self.nproc > 1 else ""
        return [
            f"mindspore {scenario}{suffix}, {optimizer}, "
            for scenario in self.scenarios
            for optimizer in self.optimizers
        ]


_NATIVE = ("adam", "adam-weight-decay")
_MINDFORMERS = ("mindformers-adamw", "mindformers-adamw-fused")

RFC_ROWS: dict[str, Row] = {
    "test_native_adam_swap_optimizer_state_align": Row(("single",), ("adam",)),
    "test_native_adam_nesterov_swap_optimizer_state_align": Row(("single",), ("adam-nesterov",)),
    "test_native_adam_amsgrad_swap_optimizer_state_align": Row(("single",), ("adam-amsgrad",)),
    "test_native_adam_weight_decay_swap_optimizer_state_align": Row(
        ("single",), ("adam-weight-decay",)
    ),
    "test_mindformers_adamw_non_fused_swap_optimizer_state_align": Row(
        ("single",), ("mindformers-adamw",)
    ),
    "test_mindformers_adamw_fused_swap_optimizer_state_align": Row(
        ("single",), ("mindformers-adamw-fused",)
    ),
    "test_native_adam_fully_shard_swap_optimizer_state_align_worker": Row(
        ("fully-shard",), ("adam",), 4
    ),
    "test_mindformers_adamw_fully_shard_swap_optimizer_state_align_worker": Row(
        ("fully-shard",), _MINDFORMERS, 4
    ),
    "test_native_adam_swap_optimizer_checkpoint_cpu_mirror_roundtrip": Row(
        ("checkpoint",), _NATIVE
    ),
    "test_native_adam_swap_optimizer_checkpoint_fresh_load_builds_slots": Row(
        ("fresh-load",), ("adam",)
    ),
    "test_mindformers_adamw_packed_swap_optimizer_checkpoint_roundtrip": Row(
        ("checkpoint",), _MINDFORMERS
    ),
}
"""By the names that the RFC gives them."""
