# SPDX-License-Identifier: Apache-2.0
"""The optimizer inputs that PyTorch tests its own optimizers with."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from swap_core import UnsupportedOptionError
from swap_testkit.torch import CpuAsDevice
from swap_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer

INFOS: list[OptimizerInfo] = [info for info in optim_db if info.optim_cls in (Adam, AdamW)]
REFUSED = {
    Adam: ("foreach", "fused", "capturable", "differentiable"),
    AdamW: ("foreach", "capturable", "differentiable"),
}
SHAPES = [(10, 5), (10,), (), (2, 3, 4)]


def inputs() -> Iterator[Any]:
    """Each input alone, and with each implementation's flag.

    Inputs for "cuda" have capturable=True and Tensor betas, and are made without a card.
    """
    for info in INFOS:
        name = info.optim_cls.__name__
        plain = [*info.optim_inputs_func(device="cpu"), *info.optim_inputs_func(device="cuda")]
        flags = ("foreach", "fused", "differentiable")
        flagged = _get_optim_inputs_including_global_cliquey_kwargs("cpu", None, info)
        # The helper leaves foreach out on the CPU.
        foreach = [(f"{i.desc} & foreach", {**i.kwargs, "foreach": True}) for i in plain]
        described = dict([*((i.desc, i.kwargs) for i in [*plain, *flagged]), *foreach])
        assert all(any(flag in desc for desc in described) for flag in (*flags, "capturable"))
        for desc, kwargs in described.items():
            words = re.sub(r"[^\w&]+", "-", f"{name}-{desc}")
            yield pytest.param(info.optim_cls, kwargs, id=words)


@pytest.mark.parametrize(("optimizer_class", "kwargs"), list(inputs()))
def test_trains_with_the_same_bits_or_is_refused(
    twins: Callable[..., Any],
    train: Callable[..., None],
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
) -> None:
    refused = [option for option in REFUSED[optimizer_class] if kwargs.get(option)]
    if refused:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = optimizer_class(params, **copy.deepcopy(kwargs))
        with pytest.raises(UnsupportedOptionError, match=f"{refused[0]}=True"):
            swap_optimizer(optimizer, device=CpuAsDevice())
        assert not is_swap_optimizer(optimizer)
        assert type(optimizer) is optimizer_class
        return
    for packed in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            config = SwapOptimizerConfig(min_numel=2, swap_times=2, packed_swap=packed)
            pair = twins(SHAPES, optimizer_class, dtype=dtype, config=config, **kwargs)
            train(pair, 4)


def error_inputs() -> Iterator[Any]:
    for info in INFOS:
        for item in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            words = re.sub(
                r"\W+", "-", f"{info.optim_cls.__name__}-{item.optimizer_error_input.desc}"
            )
            yield pytest.param(info.optim_cls, item, id=words)


@pytest.mark.parametrize(("optimizer_class", "item"), list(error_inputs()))
@pytest.mark.parametrize("after_wrapping_another", [False, True])
def test_errors_of_construction_are_native_ones(
    twins: Callable[..., Any],
    optimizer_class: type[torch.optim.Optimizer],
    item: Any,
    after_wrapping_another: bool,
) -> None:
    """Wrapping one optimizer does not change its class for others."""
    assert item.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    if after_wrapping_another:
        twins([(3,)], optimizer_class)
    params = item.optimizer_error_input.params
    if params is None:
        params = [torch.nn.Parameter(torch.ones(2))]
    kwargs = copy.deepcopy(item.optimizer_error_input.kwargs)
    expect = pytest.warns if issubclass(item.error_type, Warning) else pytest.raises
    with expect(item.error_type, match=item.error_regex):
        optimizer_class(params, **kwargs)
