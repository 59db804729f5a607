# SPDX-License-Identifier: Apache-2.0
"""What a user is told when an optimizer was wrapped."""

from __future__ import annotations

import logging
import warnings

from swap_core import HostMemoryWarning, StayReason, format_bytes
from swap_torch.engine import SwapEngine

__all__ = ["announce_host_memory", "warn_if_nothing_swaps"]

_LOG = logging.getLogger("swap_torch")


def warn_if_nothing_swaps(engine: SwapEngine) -> None:
    """Warn, once, when no state of any parameter can ever swap, and say why."""
    report = engine.report(engine.adapter.optimizer.state)
    reasons = report.stay_counts()
    may_swap = {None, StayReason.NOT_MATERIALISED}
    if any(state.stays in may_swap for state in report.states):
        return
    if not report.states:
        if any(group["params"] for group in engine.adapter.optimizer.param_groups):
            warnings.warn(
                f"swap_optimizer: this {engine.adapter.supports()} keeps no states with its "
                f"options, so there is nothing to swap. It works as before.",
                UserWarning,
                stacklevel=3,
            )
        return
    told = "; ".join(f"{count} because {reason.value}" for reason, count in reasons.items())
    warnings.warn(
        f"swap_optimizer: none of the {len(report.states)} states of this "
        f"{engine.adapter.supports()} can swap: {told}. The optimizer works as before and saves "
        f"no memory.",
        UserWarning,
        stacklevel=3,
    )


def announce_host_memory(engine: SwapEngine) -> None:
    """Log what host memory is needed and free; warn when it is too little."""
    memory = engine.host_memory()
    _LOG.info("%s: %s", engine.adapter.supports(), memory)
    if memory.missing_bytes:
        warnings.warn(
            f"swap_optimizer: {memory}: {format_bytes(memory.missing_bytes)} too little. "
            f"Let states stay on the device (device_budget), use more hosts, or shard the "
            f"optimizer; else the first step may be killed.",
            HostMemoryWarning,
            stacklevel=3,
        )
