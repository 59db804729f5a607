# SPDX-License-Identifier: Apache-2.0
"""MindFormers' real AdamW where MindFormers cannot be imported.

``import mindformers`` needs hyper-parallel, which no index carries, and about thirty packages more.
Its AdamW needs two of its own files and MindSpore. So the file is run as it is in the release, with
these stand-ins around it, and no others:

- packages without their ``__init__``: ``mindformers`` and the folders on the way to the file;
- ``mindformers.tools.logger``: a logger of the standard library;
- ``hyper_parallel``: ``DTensor``, a class of which there are no instances, and
  ``SkipDTensorDispatch``, a context that does nothing;
- ``mint.addcmul``: by ``Tensor.addcmul``, because the CPU build lacks the kernel (2.1.0 uses it);
- ``optimizer.fused_adamw_opt``: :func:`fused_adamw`, because the CPU build lacks that kernel.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mindspore import Tensor, nn, ops

__all__ = ["adamw_module", "fused_adamw", "installed_folder", "use_fused_standin"]

_FOLDERS = ("", "tools", "pynative", "pynative.optimizer")
_FILE = "mindformers.pynative.optimizer.adamw"


def adamw_module(folder: Path | None = None) -> ModuleType:
    """Run ``mindformers/pynative/optimizer/adamw.py`` and leave it in ``sys.modules``.

    Args:
        folder: Of the package ``mindformers``, such as that of an unpacked wheel; None: the one
            that is installed.

    Returns:
        The module, with the class ``AdamW``.

    Raises:
        ImportError: there is none.
    """
    folder = folder or installed_folder()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindformers"]:
        del sys.modules[name]  # of another release
    sys.modules |= {module.__name__: module for module in _standins(folder)}
    module = importlib.import_module(_FILE)
    if "mint" in vars(module):
        module.mint = SimpleNamespace(addcmul=_addcmul)  # type: ignore[attr-defined]
    return module


def installed_folder() -> Path:
    """Where ``mindformers`` is installed, without importing it.

    Raises:
        ImportError: it is not.
    """
    spec = PathFinder.find_spec("mindformers")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(
            "MindFormers is not installed. Its AdamW can be had alone: pip install --no-deps "
            "mindformers==2.1.0"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def use_fused_standin(optimizer: nn.Optimizer) -> nn.Optimizer:
    """Give a fused AdamW :func:`fused_adamw` for its kernel, at its documented attribute."""
    optimizer.fused_adamw_opt = fused_adamw
    return optimizer


def fused_adamw(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor,
    grad: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """AdamW by the formula, in place, with the arguments of MindSpore's kernel ``AdamW``.

    Args:
        param: Shape of all; fp32.
        exp_avg: Updated.
        exp_avg_sq: Updated.
        max_exp_avg_sq: Updated if ``amsgrad``; else it may be any tensor.
        grad: In the dtype of ``param``.
        step: int64, shape (1,); 0 in the first update.
        lr: Learning rate.
        beta1: Of the first moment.
        beta2: Of the second moment.
        weight_decay: Decoupled.
        eps: Added to the root.
        amsgrad: Use the maximum of the second moment.
        maximize: Go up.
    """
    count = float(step.asnumpy()[0]) + 1.0
    grad = -grad if maximize else grad
    exp_avg.copy_(exp_avg * beta1 + grad * (1.0 - beta1))
    exp_avg_sq.copy_(exp_avg_sq * beta2 + grad * grad * (1.0 - beta2))
    second = exp_avg_sq
    if amsgrad:
        max_exp_avg_sq.copy_(ops.maximum(max_exp_avg_sq, exp_avg_sq))
        second = max_exp_avg_sq
    root = (second / (1.0 - beta2**count)).sqrt() + eps
    decayed = param * (1.0 - lr * weight_decay)
    param.copy_(decayed - (exp_avg / root) * (lr / (1.0 - beta1**count)))


class _NoDTensor:
    """``hyper_parallel.DTensor``, which nothing here is."""


def _standins(folder: Path) -> Iterator[ModuleType]:
    for part in _FOLDERS:
        package = ModuleType(f"mindformers.{part}".rstrip("."))
        package.__path__ = [str(folder / part.replace(".", "/"))]
        yield package
    logger = ModuleType("mindformers.tools.logger")
    logger.logger = logging.getLogger("mindformers")  # type: ignore[attr-defined]
    yield logger
    parallel = ModuleType("hyper_parallel")
    parallel.DTensor = _NoDTensor  # type: ignore[attr-defined]
    parallel.SkipDTensorDispatch = nullcontext  # type: ignore[attr-defined]
    yield parallel


def _addcmul(base: Tensor, one: Tensor, other: Tensor, *, value: Any) -> Tensor:  # noqa: ANN401
    return base.addcmul(one, other, value)
