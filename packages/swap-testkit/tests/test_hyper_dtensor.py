# SPDX-License-Identifier: Apache-2.0
"""Parameters of HyperParallel's DTensor class (SPEC P1), through a stand-in of its interface.

The stand-in has what swapping relies on: a ``torch.Tensor`` subclass that shares the storage of
``_local_tensor``, whose gradient is the local tensor's, whose ``layout`` is not torch's, and whose
operations are refused unless ``SkipDTensorDispatch`` is active, in which they act on local tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from swap_core import SwapOptimizerConfig
from swap_testkit.torch import CpuAsDevice, same_bits
from swap_torch import sharding, swap_optimizer

skipping = False


@contextmanager
def skip_dtensor_dispatch() -> Iterator[None]:
    global skipping
    skipping = True
    try:
        yield
    finally:
        skipping = False


class DTensor(torch.Tensor):
    def __new__(cls, local: torch.Tensor, device_mesh: object, placements: object) -> DTensor:
        shell = torch.Tensor._make_subclass(cls, local, local.requires_grad)
        shell._local_tensor = local
        shell.device_mesh = device_mesh
        shell.placements = placements
        return shell

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not skipping:
            raise NotImplementedError(f"stand-in: {func} is dispatched on a DTensor")
        local_args = tree_map_only(DTensor, lambda shell: shell._local_tensor, (args, kwargs or {}))
        return func(*local_args[0], **local_args[1])

    def to_local(self) -> torch.Tensor:
        return self._local_tensor

    @property
    def layout(self) -> object:
        return "a layout of HyperParallel"

    @property
    def grad(self) -> torch.Tensor | None:
        return self._local_tensor.grad

    @property
    def shape(self) -> torch.Size:
        return self._local_tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._local_tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._local_tensor.device

    @property
    def requires_grad(self) -> bool:
        return self._local_tensor.requires_grad

    @property
    def is_leaf(self) -> bool:
        return True

    @property
    def retains_grad(self) -> bool:
        return False


MODULES = ["hyper_parallel.core.dtensor.dtensor", "hyper_parallel.core.dtensor"]
"""Where HyperParallel has the class now, and where it had it in March 2026."""
DTensor.__module__ = MODULES[0]
DTensor.__qualname__ = "DTensor"


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The stand-in's module for one test."""
    monkeypatch.setattr(DTensor, "__module__", request.param)
    monkeypatch.setattr(sharding, "_wrappers", {})
    return str(request.param)


SHAPES = [(8, 4), (3,), (16, 2), (0, 4), (5, 5)]


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    locals_ = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    # Every second one is sharded: plain and sharded parameters share an optimizer.
    return [
        DTensor(local, "mesh", ("Shard(0)",)) if number % 2 == 0 else local
        for number, local in enumerate(locals_)
    ]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def give_gradients(params: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        local(param).grad = torch.randn(local(param).shape, generator=generator)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}])
@pytest.mark.parametrize("wrap_after", [0, 2])
def test_local_shards_move_and_states_keep_their_types(
    packed: bool, options: dict[str, bool], wrap_after: int
) -> None:
    native_params, swapped_params = parameters(), parameters()
    device = CpuAsDevice(poison=True)
    config = SwapOptimizerConfig(swap_times=2, min_numel=4, packed_swap=packed)
    with skip_dtensor_dispatch():
        native = torch.optim.AdamW(native_params, **options)
        swapped = torch.optim.AdamW(swapped_params, **options)
    for step in range(4):
        give_gradients(native_params, step)
        give_gradients(swapped_params, step)
        with skip_dtensor_dispatch():
            if step == wrap_after:
                swap_optimizer(swapped, config, device=device)
            native.step()
            swapped.step()
    assert device.copies_in > 0
    assert device.held_bytes == 0
    for p, q in zip(native_params, swapped_params, strict=True):
        assert same_bits(local(p), local(q))
        with torch._C.DisableTorchFunctionSubclass():
            assert q.data_ptr() == local(q).data_ptr()  # one storage, still
        for key, state in native.state[p].items():
            assert type(swapped.state[q][key]) is type(state)
            assert same_bits(state, swapped.state[q][key])


def test_a_state_that_is_a_dtensor_stays_one(module: str) -> None:
    assert sharding.is_sharded(parameters()[0])
    (param,) = parameters()[:1]
    give_gradients([param], 0)
    with skip_dtensor_dispatch():
        optimizer = torch.optim.AdamW([param])
        optimizer.step()
        plain = optimizer.state[param]["exp_avg"]
        optimizer.state[param]["exp_avg"] = DTensor(plain.clone(), "mesh", ("Shard(0)",))
        swap_optimizer(optimizer, SwapOptimizerConfig(min_numel=4), device=CpuAsDevice())
        optimizer.step()
    state = optimizer.state[param]["exp_avg"]
    assert isinstance(state, DTensor)
    assert (state.device_mesh, state.placements) == ("mesh", ("Shard(0)",))
    assert not same_bits(local(state), plain)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("wrapped_states", [False, True])
def test_state_dicts(wrapped_states: bool, packed: bool) -> None:
    """Outside of SkipDTensorDispatch: taken, held, loaded, moved to the device and back."""
    device = CpuAsDevice(poison=True)
    config = SwapOptimizerConfig(swap_times=2, min_numel=4, packed_swap=packed)
    optimizers = []
    for _ in range(2):
        params = parameters()
        with skip_dtensor_dispatch():
            optimizer = torch.optim.AdamW(params, fused=True)
            give_gradients(params, 0)
            optimizer.step()
            for param in params if wrapped_states else ():
                for key, value in optimizer.state[param].items():
                    if isinstance(param, DTensor) and key != "step":
                        state = DTensor(value, "mesh", ("Shard(0)",))
                        optimizer.state[param][key] = state
            optimizers.append(optimizer)
    native, swapped = optimizers
    with skip_dtensor_dispatch():
        swap_optimizer(swapped, config, device=device)

    def step(number: int) -> None:
        for optimizer in optimizers:
            give_gradients(optimizer.param_groups[0]["params"], number)
            with skip_dtensor_dispatch():
                optimizer.step()

    step(1)
    held = swapped.state_dict()
    before = {
        (index, key): local(value).clone()
        for index, entry in native.state_dict()["state"].items()
        for key, value in entry.items()
    }
    step(2)
    for (index, key), value in before.items():
        assert same_bits(local(held["state"][index][key]), value)
    with swapped.states_on_device():
        step(3)
    swapped.load_state_dict(swapped.state_dict())
    held_twice = [swapped.state_dict(), dict(swapped.state)]
    swapped.load_state_dict(held_twice[0])
    step(4)
    pairs = zip(native.state.items(), swapped.state.items(), strict=True)
    for (p, one), (q, other) in pairs:
        assert same_bits(local(p), local(q))
        for key, value in one.items():
            assert type(other[key]) is type(value)
            assert same_bits(local(value), local(other[key]))
