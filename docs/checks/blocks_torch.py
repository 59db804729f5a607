# SPDX-License-Identifier: Apache-2.0
"""What the code of pages finds in its namespace, for torch; see ``blocks``.

``model`` is on the simulated accelerator, as ``npu``, so states really swap, and a race of a block
fails its page. ``loss`` is one loss of it, ``x`` a batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks import sybil

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator.build import build

__all__ = ["pytest_collect_file"]

DEVICE = "npu"


def _setup(namespace: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        build()
    except simulator.BuildError as error:
        if "needs a C++20 compiler" not in str(error):
            raise
        pytest.skip(f"the code of pages is not run: {error}")
    simulator.enable(DEVICE, devices=2)
    simulator.reset()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(8, 64).to(DEVICE)
    namespace.update(torch=torch, nn=torch.nn, model=model, x=x, loss=model(x).square().mean())


def _teardown() -> None:
    if simulator.enabled_name() is None:
        return
    simulator.set_memory_limit(None)
    assert simulator.races() == []
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


pytest_collect_file = sybil(_setup, _teardown).pytest()
