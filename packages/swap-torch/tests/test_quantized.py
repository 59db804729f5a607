# SPDX-License-Identifier: Apache-2.0
"""States that are wrappers around several tensors, as quantized ones are: they move as one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from swap_core import StayReason, align
from swap_testkit.torch import CpuAsDevice, assert_same_bits
from swap_testkit.torch.compare import differences
from swap_testkit.torch.laws import LAWS, Subject, check_law
from swap_torch import PerParameterAdapter, SwapOptimizerConfig, swap_optimizer
from swap_torch.forms import Form

torch.set_num_threads(1)

CONFIG = SwapOptimizerConfig(min_numel=20, swap_times=3)
aten = torch.ops.aten


class Coded(torch.Tensor):
    """A matrix of bytes, with a scale for each row."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, dtype: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )

    def __init__(self, codes: Any, scale: Any, dtype: Any) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, shape: Any, stride: Any) -> Any:
        made = cls(inner["codes"], inner["scale"], dtype)
        assert (made.shape, made.stride()) == (torch.Size(shape), tuple(stride))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            raise NotImplementedError(f"{func} of a Coded")
        if func is aten._to_copy.default:  # as torchao: says another dtype, and need not copy
            inner = [memory.to(kwargs.get("device")) for memory in (args[0].codes, args[0].scale)]
            return cls(*inner, kwargs.get("dtype", args[0].dtype))
        codes, scale = (
            func(*tree_map_only(cls, lambda each, of=name: getattr(each, of), args), **kwargs)
            for name in ("codes", "scale")
        )
        return cls(codes, scale, args[0].dtype)

    @classmethod
    def zeros(cls, shape: Any, dtype: Any, device: Any) -> Coded:
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(shape[0], device=device), dtype)

    def read(self) -> torch.Tensor:
        return self.codes.float().sub_(128) * self.scale.view(-1, *[1] * (self.dim() - 1))

    def write(self, values: torch.Tensor) -> None:
        rows = values.flatten(1).abs().amax(1) if values.dim() > 1 else values.abs()
        self.scale.copy_(rows.clamp(min=1e-6) / 127)
        self.codes.copy_((values / self.scale.view(-1, *[1] * (self.dim() - 1))).round() + 128)


torch.serialization.add_safe_globals([Coded])


class Quantized(Optimizer):
    """Momentum in bytes, or in floats where that saves nothing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def new(self, like: torch.Tensor) -> torch.Tensor:
        if like.numel() < 30:
            return torch.zeros_like(like)
        return Coded.zeros(like.shape, like.dtype, like.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["mean"] = 0, self.new(param)
                state["step"] += 1
                mean = state["mean"]
                if isinstance(mean, Coded):
                    values = mean.read().lerp_(param.grad.float(), 0.1)
                    mean.write(values)
                else:
                    values = mean.lerp_(param.grad, 0.1)
                param.sub_((group["lr"] * values).to(param.dtype))


class QuantizedAdapter(PerParameterAdapter):
    optimizer_class = Quantized
    state_names = ("mean",)
    counter_names = ("step",)
    wrapper_states = frozenset({f"{Coded.__module__}.Coded"})

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        return Quantized.new(self.optimizer, param.detach().to("meta"))


class Untold(QuantizedAdapter):
    """Does not say that its states may be wrappers."""

    wrapper_states = frozenset()


@pytest.mark.parametrize("law", LAWS)
def test_law(law: str) -> None:
    check_law(law, Subject(Quantized, adapter=QuantizedAdapter))


def train(optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def make(adapter: Any = None, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """One parameter of 8 × 32, and its optimizer: native, or swapped by ``adapter``."""
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    optimizer = Quantized([torch.nn.Parameter(values.to(dtype))])
    if adapter is not None:
        config = SwapOptimizerConfig(**{"min_numel": 20, **fields})
        swap_optimizer(optimizer, config, device=CpuAsDevice(poison=True), adapter=adapter)
    return optimizer


def state_of(optimizer: Any) -> Any:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["mean"]


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_are_those_of_all_memories(packed: bool) -> None:
    optimizer = make(QuantizedAdapter, packed_swap=packed)
    train(optimizer, 2)
    before = optimizer.swap_report()
    train(optimizer, 1)
    after = optimizer.swap_report()
    nbytes = align(8 * 32) + 8 * 4  # codes, and scales at the next aligned offset
    assert [state.nbytes for state in after.states] == [nbytes]
    moved = align(nbytes) if packed else nbytes
    assert after.ledger.bytes_loaded - before.ledger.bytes_loaded == moved
    assert after.host_bytes == align(nbytes)


def test_what_is_shown_stays_the_same_object() -> None:
    optimizer = make(QuantizedAdapter)
    train(optimizer, 1)
    shown = state_of(optimizer)
    codes = shown.codes
    train(optimizer, 2, first=1)
    native = make()
    train(native, 3)
    assert state_of(optimizer) is shown
    assert type(shown) is Coded
    assert shown.codes is codes
    assert torch.equal(codes, state_of(native).codes)


@pytest.mark.parametrize("of", ["codes", "scale"])
def test_a_state_dict_keeps_its_values_while_one_memory_is_held(of: str) -> None:
    optimizer, native = make(QuantizedAdapter), make()
    for each in (optimizer, native):
        train(each, 2)
    held = getattr(optimizer.state_dict()["state"][0]["mean"], of)
    before = held.clone()
    for each in (optimizer, native):
        train(each, 2, first=2)
    assert torch.equal(held, before)
    assert_same_bits(native, optimizer)


def test_one_memory_replaced_is_noticed() -> None:
    optimizer, native = make(QuantizedAdapter), make()
    for each in (optimizer, native):
        train(each, 2)
        state_of(each).scale.data = state_of(each).scale * 2
        train(each, 2, first=2)
    assert_same_bits(native, optimizer)
    assert optimizer.swap_report().states[0].stays is None


def test_a_copy_of_a_wrapper_that_stays_does_not_change_later() -> None:
    with pytest.warns(UserWarning, match="fewer elements than min_numel"):
        optimizer = make(QuantizedAdapter, min_numel=10_000)
    train(optimizer, 2)
    held = optimizer.state_dict()["state"][0]["mean"]
    before = held.codes.clone()
    train(optimizer, 2, first=2)
    assert torch.equal(held.codes, before)


def test_a_wrapper_that_stays_is_loaded_in_the_dtype_of_its_parameter() -> None:
    source, native = make(), make(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="fewer elements than min_numel"):
        ours = make(QuantizedAdapter, dtype=torch.bfloat16, min_numel=10_000)
    train(source, 2)
    for optimizer in (native, ours):
        optimizer.load_state_dict(source.state_dict())
    assert state_of(ours).dtype == state_of(native).dtype == torch.bfloat16
    assert_same_bits(native, ours)


def test_memory_that_two_states_share_stays() -> None:
    params = [torch.nn.Parameter(torch.ones(8, 32)) for _ in range(3)]
    optimizer = Quantized(params)
    train(optimizer, 1)
    one, other, _ = (optimizer.state[param]["mean"] for param in params)
    one.scale = other.scale
    swap_optimizer(optimizer, CONFIG, device=CpuAsDevice(), adapter=QuantizedAdapter)
    stays = [state.stays for state in optimizer.swap_report().states]
    assert stays == [StayReason.SHARES_STORAGE, StayReason.SHARES_STORAGE, None]


def test_wrappers_that_the_adapter_does_not_name_stay() -> None:
    optimizer, native = make(), make()
    train(optimizer, 1)
    with pytest.warns(UserWarning, match="tensor subclass"):
        swap_optimizer(optimizer, CONFIG, device=CpuAsDevice(poison=True), adapter=Untold)
    train(optimizer, 2, first=1)
    train(native, 3)
    assert_same_bits(native, optimizer)
    assert [state.stays for state in optimizer.swap_report().states] == [StayReason.NOT_PLAIN]


class Recoded(Coded):
    """The same memories in another class."""


def test_a_form_is_that_of_the_memories_and_of_what_they_are_in() -> None:
    shape = (4, 8)
    form = Form(Coded.zeros(shape, torch.float32, "cpu"))
    assert form == Form(Coded.zeros(shape, torch.float32, "meta"))
    assert form != Form(Coded.zeros(shape, torch.bfloat16, "cpu"))
    assert form != Form(Recoded.zeros(shape, torch.float32, "cpu"))
    assert form != Form(torch.zeros(shape, dtype=torch.uint8))


def test_a_form_keeps_no_values() -> None:
    state = Coded.zeros((4, 8), torch.float32, "cpu")
    memories = [weakref.ref(memory.untyped_storage()) for memory in (state.codes, state.scale)]
    form = Form(state)
    del state
    assert [memory() for memory in memories] == [None, None]
    assert type(form.empty_on(torch.device("cpu"))) is Coded


@pytest.mark.parametrize(("stride", "made"), [((1, 2), (1, 2)), ((7, 1), (4, 1)), ((1, 7), (1, 2))])
def test_a_form_is_dense_in_the_order_of_dimensions_that_it_is_given(
    stride: Any, made: Any
) -> None:
    assert Form(torch.empty_strided((2, 4), stride)).memories[0].stride == made


def test_a_difference_in_any_memory_is_found() -> None:
    one, other = make(), make()
    for each in (one, other):
        train(each, 1)
    state_of(other).scale[3] += 1
    (found,) = differences(one, other)
    assert "Coded torch.float32 (8, 32)" in found.native
    assert "from byte 26" in found.native  # 8 * 32 codes, then 3 scales
