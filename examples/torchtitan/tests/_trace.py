# SPDX-License-Identifier: Apache-2.0
"""What a training computed, step by step, to the last bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor

from swap_torch import is_swap_optimizer


class TracingMetrics(MetricsProcessor):
    """Writes a line for each step that torchtitan logs, one file for each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, *, dump_folder: str, **runtime):
        super().__init__(config, dump_folder=dump_folder, **runtime)
        self._file = Path(dump_folder, f"trace.{torch.distributed.get_rank()}.jsonl")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("")

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        optimizers = list(self.optimizers)
        states = [each for optimizer in optimizers for each in _states(optimizer)]
        line = {
            "step": step,
            "loss": float(global_avg_loss).hex(),
            "grad_norm": float(grad_norm).hex(),
            "parameters": _digest(p for part in self.model_parts for p in part.parameters()),
            "states": _digest(states),
            "metrics": sorted(name for name in extra_metrics if name.startswith("lr/")),
            "swapped": [is_swap_optimizer(optimizer) for optimizer in optimizers],
            "host_bytes": sum(_host_bytes(optimizer) for optimizer in optimizers),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def trace_of(metrics: MetricsProcessor.Config) -> TracingMetrics.Config:
    """The same settings, with a trace."""
    return TracingMetrics.Config(**{f.name: getattr(metrics, f.name) for f in fields(metrics)})


def read_traces(folder: Path) -> list[list[dict[str, object]]]:
    """What the run with this dump folder wrote: for each rank, for each step."""
    files = sorted(folder.glob("trace.*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found += [value for _, value in sorted(optimizer.state.get(param, {}).items())]
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        data = _local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data.numpy().tobytes())
    return digest.hexdigest()


def _host_bytes(optimizer: torch.optim.Optimizer) -> int:
    return optimizer.swap_report().ledger.host_bytes if is_swap_optimizer(optimizer) else 0
