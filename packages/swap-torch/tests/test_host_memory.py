# SPDX-License-Identifier: Apache-2.0
"""What host memory a run needs is told before it starts, and is what it then takes."""

from __future__ import annotations

import ast
import builtins
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swap_core
import swap_torch
from swap_core import HostMemoryWarning
from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig as Config
from swap_torch import swap_optimizer

SHAPES = [(1000,), (30, 7), (2049,), (5,)]
CONFIGS = [
    {},
    {"min_numel": 100},
    {"state_keys": ("exp_avg",)},
    {"device_budget": 0.5},
]


def optimizer(device: Any, **config: Any) -> Any:
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    frozen = torch.nn.Parameter(torch.zeros(999), requires_grad=False)
    native = torch.optim.AdamW([*params, frozen])
    return swap_optimizer(native, Config(**{"min_numel": 0, **config}), device=device)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_told_is_what_is_taken(config: dict[str, Any]) -> None:
    device = CpuAsDevice()
    swapped = optimizer(device, **config)
    told = swapped.host_memory()
    assert told.held_bytes == 0
    for p in swapped.param_groups[0]["params"][:-1]:
        p.grad = torch.ones_like(p)
    swapped.step()
    assert told.needed_bytes == device.host_bytes > 0
    assert swapped.host_memory().held_bytes == device.host_bytes


def test_processes_of_a_host_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert optimizer(CpuAsDevice()).host_memory().processes == 8


def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="swap_torch"):
        swapped = optimizer(CpuAsDevice())
    assert caplog.messages == [f"torch.optim.AdamW: {swapped.host_memory()}"]


def test_too_little_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap_torch.engine.available_host_memory", lambda: 3000)
    with pytest.warns(HostMemoryWarning, match=r"too little\. Let states stay") as warned:
        optimizer(CpuAsDevice())
    assert [w.filename for w in warned] == [__file__]


TOO_LITTLE = """
import torch
import swap_torch.engine
from swap_testkit.torch import CpuAsDevice
from swap_torch import swap_optimizer

swap_torch.engine.available_host_memory = lambda: 3000
parameter = torch.nn.Parameter(torch.zeros(2000))
swap_optimizer(torch.optim.AdamW([parameter]), device=CpuAsDevice())
"""


def test_who_set_no_filter_sees_that_it_is_too_little() -> None:
    # -I: neither PYTHONWARNINGS nor a development mode shows what is hidden by default.
    command = [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path}{TOO_LITTLE}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "HostMemoryWarning: swap_optimizer: optimizer states need" in told


HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""What Python does not show where nobody asked."""


def categories(package: Any) -> Iterator[str]:
    """What the calls of ``warnings.warn`` in a package give as their category."""
    for file in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                yield ast.unparse(node.args[1]) if len(node.args) > 1 else "UserWarning"


@pytest.mark.parametrize("package", [swap_core, swap_torch], ids=lambda package: package.__name__)
def test_every_warning_is_of_a_kind_that_is_shown(package: Any) -> None:
    for name in categories(package):
        kind = getattr(builtins, name, None) or getattr(swap_core, name)
        assert not issubclass(kind, HIDDEN), name


def test_enough_is_not(monkeypatch: pytest.MonkeyPatch, twins: Callable[..., Any]) -> None:
    needed = optimizer(CpuAsDevice()).host_memory().needed_bytes
    monkeypatch.setattr("swap_torch.engine.available_host_memory", lambda: needed)
    optimizer(CpuAsDevice())
