# SPDX-License-Identifier: Apache-2.0
"""What the code of pages finds in its namespace, for MindSpore's CPU build; see ``blocks``.

``net`` is a network, ``forward`` its loss on ``data`` and ``label``. The host plays the device's
part, since that build has no other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mindspore
import numpy as np
from blocks import sybil
from mindspore import nn

import swap_mindspore

__all__ = ["pytest_collect_file"]


def _setup(namespace: dict[str, Any]) -> None:
    mindspore.set_seed(0)
    net = nn.SequentialCell(nn.Dense(64, 64), nn.Tanh(), nn.Dense(64, 64))
    data, label = (mindspore.Tensor(np.ones((8, 64), np.float32)) for _ in range(2))

    def forward(data: mindspore.Tensor, label: mindspore.Tensor) -> mindspore.Tensor:
        return (net(data) - label).square().mean()

    # On a card this argument is not needed: pages do not have it.
    on_host = partial(swap_mindspore.swap_optimizer, device=swap_mindspore.HostDevice())
    namespace.update(
        mindspore=mindspore, nn=nn, net=net, data=data, label=label, forward=forward,
        on_host=on_host,
    )  # fmt: skip


def _teardown() -> None:
    """Nothing outlives a page."""


pytest_collect_file = sybil(_setup, _teardown).pytest()
