# SPDX-License-Identifier: Apache-2.0
"""Optimizers of others: their own step on each batch, and what an adapter's few lines must say."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

from swap_core import UnsupportedOptimizerError
from swap_core.adapter import ADAPTER_GROUP
from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits, same_bits
from swap_testkit.torch.laws import LAWS, Subject, check_law
from swap_torch import (
    PerParameterAdapter,
    SwapOptimizerConfig,
    TorchSwapOptimizer,
    is_swap_optimizer,
    swap_optimizer,
)
from swap_torch.native import TorchSGDAdapter

torch.set_num_threads(1)

CONFIG = SwapOptimizerConfig(min_numel=2, swap_times=3)
SHAPES = [(5, 7), (12, 4), (3,), (4, 12), (9, 9), (33,)]


def parameters(shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


class Odd(Optimizer):
    """Does what optimizers of others do: counts in the state, in the group and in itself, as
    Python numbers and as tensors; makes a new tensor in each step, and one of another size.
    """

    updates = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0, "scale": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            group["calls"] += 1
            group["scale"] = group["scale"] * 0.99
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["age"] = 0
                    state["mean"] = torch.zeros_like(param)
                    state["rows"] = param.new_zeros(param.shape[0], dtype=torch.float64)
                    state["note"] = None
                state["age"] += 1
                state["note"] = self.updates % 3 == 0
                state["mean"] = state["mean"] * 0.9 + param.grad  # not in place
                state["rows"].add_(param.grad.flatten(1).sum(1) if param.dim() > 1 else param.grad)
                factor = group["lr"] * float(group["scale"]) / (state["age"] + self.updates)
                param.sub_(state["mean"] * factor)


class OddAdapter(PerParameterAdapter):
    optimizer_class = Odd
    state_names = ("mean", "rows")
    counter_names = ("age",)

    def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
        if key == "mean":
            return param
        return torch.empty(param.shape[0], dtype=torch.float64, device="meta")


class MuonWithAdam(Optimizer):
    """One optimizer with two kinds of group, as some projects have it."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.02, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                update = self._orthogonal if group["use_muon"] else self._adam
                param.sub_(update(param, self.state[param]), alpha=group["lr"])

    @staticmethod
    def _orthogonal(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(param.grad, 0.05)
        left, _, right = torch.linalg.svd(momentum.float(), full_matrices=False)
        return (left @ right).to(param.dtype)

    @staticmethod
    def _adam(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            state["step"] = 0
        state["step"] += 1
        first = state["exp_avg"].lerp_(param.grad, 0.1)
        second = state["exp_avg_sq"].lerp_(param.grad.square(), 0.01)
        bias = (1 - 0.9 ** state["step"]), (1 - 0.99 ** state["step"])
        return (first / bias[0]) / ((second / bias[1]).sqrt() + 1e-8)


class MuonWithAdamAdapter(PerParameterAdapter):
    optimizer_class = MuonWithAdam
    state_names = ("momentum_buffer", "exp_avg", "exp_avg_sq")

    def state_keys(self, group: Any) -> tuple[str, ...]:
        return self.state_names[:1] if group["use_muon"] else self.state_names[1:]


def muon_with_adam(params: Any) -> MuonWithAdam:
    """Groups as they are; of plain parameters, matrices go with Muon."""
    params = list(params)
    if not isinstance(params[0], dict):
        matrices = [param for param in params if param.dim() == 2]
        rest = [param for param in params if param.dim() != 2]
        params = [{"params": matrices, "use_muon": True}, {"params": rest}]
    return MuonWithAdam(params)


SUBJECTS = {
    "odd": Subject(Odd, OddAdapter),
    "muon-with-adam": Subject(
        muon_with_adam, MuonWithAdamAdapter, group_options=({"lr": 0.01, "use_muon": False},)
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_law(name: str, law: str) -> None:
    check_law(law, SUBJECTS[name])


class Installed(NamedTuple):
    """An entry point of another distribution."""

    name: str
    adapter: type[PerParameterAdapter]
    value: str = "another_package:OddAdapter"

    def load(self) -> type[PerParameterAdapter]:
        return self.adapter


def test_an_adapter_is_found_through_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [*entry_points(group=ADAPTER_GROUP), Installed("torch.odd", OddAdapter)]
    monkeypatch.setattr("swap_core.adapter.entry_points", lambda group: entries)
    odd = swap_optimizer(Odd(parameters()), CONFIG, device=CpuAsDevice())
    sgd = swap_optimizer(optim.SGD(parameters(), momentum=0.9), CONFIG, device=CpuAsDevice())
    assert is_swap_optimizer(odd)
    assert is_swap_optimizer(sgd)


def test_without_an_adapter_it_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"Odd, which is not supported.*adapter"):
        swap_optimizer(Odd(parameters()), device=CpuAsDevice())


@pytest.mark.parametrize("adapter", [Odd, "torch.odd", OddAdapter(Odd(parameters()))])
def test_what_is_no_adapter_class_is_refused(adapter: Any) -> None:
    with pytest.raises(ValueError, match=r"adapter=.* is not accepted; give a class derived"):
        swap_optimizer(Odd(parameters()), device=CpuAsDevice(), adapter=adapter)


def test_an_adapter_for_another_class_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"OddAdapter is for .*Odd, and the .* SGD"):
        swap_optimizer(optim.SGD(parameters()), device=CpuAsDevice(), adapter=OddAdapter)


def test_a_subclass_with_a_step_of_its_own_needs_to_be_told() -> None:
    class Own(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    native, swapped = (Own(parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    with pytest.raises(UnsupportedOptimizerError, match="Own, which is not supported"):
        swap_optimizer(swapped, CONFIG, device=CpuAsDevice())
    swap_optimizer(swapped, CONFIG, device=CpuAsDevice(), adapter=TorchSGDAdapter)
    for step in range(3):
        for optimizer in (native, swapped):
            give_gradients(optimizer, step)
            optimizer.step()
    assert_same_bits(native, swapped)


# What couples parameters.


class Coupled(Optimizer):
    """Its step size follows from all parameters' gradients, and is kept in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["d"] += sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
            for param in group["params"]:
                state = self.state[param]
                state["mean"] = state.get("mean", torch.zeros_like(param)).add_(param.grad)
                param.sub_(state["mean"], alpha=group["lr"] / group["d"])


class CoupledAdapter(PerParameterAdapter):
    optimizer_class = Coupled
    state_names = ("mean",)


def test_an_update_that_couples_parameters_is_noticed_by_what_it_leaves_in_the_group() -> None:
    optimizer = Coupled(parameters())
    swap_optimizer(optimizer, CONFIG, device=CpuAsDevice(), adapter=CoupledAdapter)
    give_gradients(optimizer, 0)
    with pytest.raises(UnsupportedOptimizerError, match=r"group 0's 'd'.*depends on all param"):
        optimizer.step()
    assert all(entry["mean"].isfinite().all() for entry in optimizer.state.values())


def test_lbfgs_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="updates all parameters together"):
        swap_optimizer(optim.LBFGS(parameters()))


def test_torchao_for_quantized_parameters_is_refused_with_the_reason() -> None:
    kind = type("_AdamW", (optim.SGD,), {"__module__": "torchao.optim.adam", "step": Odd.step})
    with pytest.raises(UnsupportedOptimizerError, match="It is for quantized parameters"):
        swap_optimizer(kind(parameters()))


# Containers.


class Hybrid(Optimizer):
    """Two optimizers behind one interface, one with the matrices, one with the rest."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        matrices = [param for param in params if param.dim() == 2]
        rest = [param for param in params if param.dim() != 2]
        self.muon = torch.optim.Muon(matrices, lr=0.02)
        self.adamw = optim.AdamW(rest, lr=0.01)
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:
        self.muon.step()
        self.adamw.step()


class ListOfOptimizers(Optimizer):
    """As torchtitan's container holds them."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        hybrid = Hybrid(params)
        self.optimizers = [hybrid.muon, hybrid.adamw]
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def inner(container: Any) -> list[Optimizer]:
    return getattr(container, "optimizers", None) or [container.muon, container.adamw]


@pytest.mark.parametrize("kind", [Hybrid, ListOfOptimizers])
def test_the_optimizers_in_a_container_swap_one_by_one(kind: Callable[..., Optimizer]) -> None:
    native, swapped = kind(parameters()), kind(parameters())
    device = CpuAsDevice()
    with pytest.raises(UnsupportedOptimizerError, match=r"holds other optimizers: .*Muon.*AdamW"):
        swap_optimizer(swapped, CONFIG, device=device)
    for optimizer in inner(swapped):
        swap_optimizer(optimizer, CONFIG, device=device)
    for step in range(3):
        for container in (native, swapped):
            give_gradients(container, step)
            container.step()
        for one, other in zip(inner(native), inner(swapped), strict=True):
            assert_same_bits(one, other)
        assert device.held_bytes == 0


# torch's own, where the generic way must be careful.


def test_sgd_without_momentum_has_nothing_to_swap_and_says_so() -> None:
    native, swapped = (optim.SGD(parameters(), lr=0.1) for _ in range(2))
    with pytest.warns(UserWarning, match="this torch.optim.SGD keeps no states"):
        swap_optimizer(swapped, CONFIG, device=CpuAsDevice())
    for step in range(2):
        for optimizer in (native, swapped):
            give_gradients(optimizer, step)
            optimizer.step()
    assert_same_bits(native, swapped)
    assert swapped.state_dict()["state"] == native.state_dict()["state"] == {}


def test_momentum_may_be_switched_on_and_off() -> None:
    native, swapped = (optim.SGD(parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    swap_optimizer(swapped, CONFIG, device=CpuAsDevice())
    for step, momentum in enumerate((0.9, 0.0, 0.5, 0.5, 0.0, 0.9)):
        for optimizer in (native, swapped):
            optimizer.param_groups[0]["momentum"] = momentum
            give_gradients(optimizer, step)
            optimizer.step()
        assert_same_bits(native, swapped)


@pytest.fixture
def foreach_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])


def test_an_odd_parameter_type_decides_for_the_whole_group(
    foreach_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OddParameter(torch.nn.Parameter):
        """foreach=None means a for-loop if one parameter is of a type that torch does not know."""

    calls: list[int] = []
    foreach = torch._foreach_mul_

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return foreach(*args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_mul_", counted)
    for odd, expected in ((True, 0), (False, 3)):
        params = parameters([(8,), (9,), (10,)])
        if odd:
            params[2] = OddParameter(params[2].detach())
        optimizer = optim.SGD(params, lr=0.1, momentum=0.9)
        swap_optimizer(optimizer, CONFIG, device=CpuAsDevice())
        for step in range(2):
            calls.clear()
            give_gradients(optimizer, step)
            optimizer.step()
        assert len(calls) == expected, f"{odd=}"


def test_a_grad_scaler_reaches_the_fused_step() -> None:
    found = []
    for swap in (False, True):
        optimizer = optim.SGD(parameters(), lr=0.1, momentum=0.9, fused=True)
        if swap:
            swap_optimizer(optimizer, CONFIG, device=CpuAsDevice())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            give_gradients(optimizer, step)
            for param in optimizer.param_groups[0]["params"]:
                param.grad.mul_(8.0)
            if step == 2:
                optimizer.param_groups[0]["params"][0].grad[0] = float("inf")
            scaler.scale(torch.ones(()))  # makes the scale
            scaler.step(optimizer)
            scaler.update(8.0)
        found.append(optimizer)
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", [optim.RMSprop, torch.optim.Muon, optim.Adafactor])
def test_sparse_gradients_and_closures_are_refused_before_anything_changes(
    kind: Callable[..., Optimizer],
) -> None:
    (param,) = parameters([(6, 4)])
    optimizer = kind([param])
    swap_optimizer(optimizer, CONFIG, device=CpuAsDevice())
    before = param.detach().clone()
    param.grad = torch.ones(6, 4).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="allow_closure=True"):
        optimizer.step(lambda: 0.0)
    assert torch.equal(param, before)
    assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.Muon, optim.Adafactor])
def test_complex_parameters_are_refused_as_natively(kind: Callable[..., Optimizer]) -> None:
    params = [*parameters([(6, 4)]), torch.nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))]
    optimizer = kind(params)
    swap_optimizer(optimizer, CONFIG, device=CpuAsDevice())
    give_gradients(optimizer, 0)
    with pytest.raises(RuntimeError, match="does not support complex parameters"):
        optimizer.step()
    assert not optimizer.state


def test_a_template_that_is_wrong_costs_memory_for_one_step_only() -> None:
    class Wrong(OddAdapter):
        def template(self, param: torch.Tensor, key: str) -> torch.Tensor:
            return param

    native, swapped = (Odd(parameters()) for _ in range(2))
    swap_optimizer(swapped, CONFIG, device=CpuAsDevice(), adapter=Wrong)
    assert isinstance(swapped, TorchSwapOptimizer)
    in_host_memory = []
    for step in range(3):
        for optimizer in (native, swapped):
            give_gradients(optimizer, step)
            optimizer.step()
        assert_same_bits(native, swapped)
        shown = swapped._swap._table.homes.by_shown()
        rows = [entry["rows"] for entry in swapped.state.values()]
        in_host_memory.append(all(id(each) in shown for each in rows))
    assert in_host_memory == [False, True, True]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_states_that_the_user_throws_away_are_born_in_host_memory_again(
    kind: Callable[..., Optimizer], held: bool
) -> None:
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    native, swapped = (kind(parameters(), lr=0.1, **options) for _ in range(2))
    swap_optimizer(swapped, CONFIG, device=CpuAsDevice())
    assert isinstance(swapped, TorchSwapOptimizer)
    old: list[Any] = []
    for step in range(4):
        for optimizer in (native, swapped):
            if step == 2:
                old += [dict(entry) for entry in swapped.state.values()] if held else []
                optimizer.state.clear()
            give_gradients(optimizer, step)
            optimizer.step()
        assert_same_bits(native, swapped)
        shown = swapped._swap._table.homes.by_shown()
        keys = ("momentum_buffer", "exp_avg", "exp_avg_sq")
        entries = swapped.state.values()
        assert all(id(e[key]) in shown for e in entries for key in keys if key in e), step
        if step == 2:
            kept = [value.clone() for entry in old for value in entry.values()]
    assert all(map(torch.equal, kept, (v for entry in old for v in entry.values())))


def test_names_of_states_that_are_refused_come_with_those_that_are_there() -> None:
    for optimizer, has in (
        (optim.RMSprop(parameters(), momentum=0.9), "square_avg, momentum_buffer"),
        (torch.optim.Muon(parameters([(4, 4)])), "momentum_buffer"),
        (optim.SGD(parameters()), "none with these options"),
    ):
        config = SwapOptimizerConfig(state_keys=("exp_avg",))
        with pytest.raises(ValueError, match=rf"'exp_avg', which this .* It has: {has}\."):
            swap_optimizer(optimizer, config, device=CpuAsDevice())


def test_a_wrapped_one_warns_about_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = swap_optimizer(optim.NAdam(parameters()), CONFIG, device=CpuAsDevice())
        give_gradients(optimizer, 0)
        optimizer.step()
    assert "NAdam(swapped: packed" in repr(optimizer)
    assert optimizer.swap_report().optimizer == "torch.optim.NAdam"  # type: ignore[attr-defined]


class Historian(Optimizer):
    """Has tensors inside lists, tuples and dicts, which are not of the parameter's size."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                    state["step"] = 0
                    state["history"] = [(torch.ones(2) / 3, 7), {"step": torch.ones(1) / 3}]
                    # Named as the state that swaps is. No text: natively it does not survive.
                    state["inner"] = {"mean": torch.ones(3) / 3, "tags": {7}}
                state["step"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                norm = state["history"][0][0].sum() + state["inner"]["mean"].sum()
                param.sub_(state["mean"] * norm, alpha=group["lr"])


class HistorianAdapter(PerParameterAdapter):
    optimizer_class = Historian
    state_names = ("mean",)


def shape_of(value: object) -> object:
    """What a state consists of: containers as they are, tensors by dtype and values."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(shape_of(each) for each in value)
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tensors_inside_containers_are_cast_as_natively(dtype: torch.dtype) -> None:
    params = [[p.detach().to(dtype).requires_grad_() for p in parameters()] for _ in range(2)]
    native, swapped = Historian(params[0]), Historian(params[1])
    swap_optimizer(swapped, CONFIG, device=CpuAsDevice(), adapter=HistorianAdapter)
    for step in range(4):
        if step == 2:
            state_dict = copy.deepcopy(native.state_dict())
            for optimizer in (native, swapped):
                optimizer.load_state_dict(state_dict)
            found = [shape_of(dict(enumerate(each.state.values()))) for each in (native, swapped)]
            assert found[0] == found[1]
            taken, given = swapped.state[params[1][0]], state_dict["state"][0]
            assert taken["history"][0][0] is not given["history"][0][0]
            assert taken["inner"]["tags"] is not given["inner"]["tags"]
        for optimizer in (native, swapped):
            give_gradients(optimizer, step)
            optimizer.step()
        assert_same_bits(native, swapped)


def native_and_swapped(make: Callable[[], Optimizer]) -> tuple[Optimizer, Optimizer]:
    native, swapped = make(), make()
    return native, swap_optimizer(
        swapped, CONFIG, device=CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
    )


MIXED = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_that_begins_late(foreach: bool | None, nesterov: bool) -> None:
    """torch's foreach updates all momenta one by one if one is new: in bfloat16 other bits."""

    def make() -> Optimizer:
        params = [
            p.detach().to(d).requires_grad_() for p, d in zip(parameters(), MIXED, strict=False)
        ]
        return optim.SGD(params, 0.1, 0.9, foreach=foreach, nesterov=nesterov, weight_decay=0.1)

    native, swapped = native_and_swapped(make)
    for step in range(8):
        for optimizer in (native, swapped):
            give_gradients(optimizer, step)
            for position, param in enumerate(optimizer.param_groups[0]["params"]):
                if position > step // 2 + 1:
                    param.grad = None
            optimizer.step()
        assert_same_bits(native, swapped)


def dense(value: object) -> object:
    return shape_of(value.to_dense() if isinstance(value, torch.Tensor) else value)


SPARSE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, 0.1),
    "SGD, momentum": lambda params: optim.SGD(params, 0.1, 0.9),
    "SGD, foreach": lambda params: optim.SGD(params, 0.1, foreach=True),
    "SGD, foreach, momentum": lambda params: optim.SGD(params, 0.1, 0.9, foreach=True),
    "Adagrad": lambda params: optim.Adagrad(params, 0.1, initial_accumulator_value=0.1),
    "Adagrad, foreach": lambda params: optim.Adagrad(params, 0.1, foreach=True),
}


def give_some_sparse(optimizer: Optimizer, step: int) -> None:
    give_gradients(optimizer, step)
    params = optimizer.param_groups[0]["params"]
    for position in (1, 3):
        mask = (torch.arange(len(params[position])) + step) % 3 == 0
        params[position].grad = (params[position].grad * mask[:, None]).to_sparse(1)
    if step == 1:
        params[3].grad = None


def assert_equal_with_sparse_states(native: Optimizer, swapped: Optimizer) -> None:
    for p, q in zip(*(o.param_groups[0]["params"] for o in (native, swapped)), strict=True):
        assert same_bits(p, q)
        for key, value in native.state[p].items():
            assert dense(value) == dense(swapped.state[q][key])


@pytest.mark.filterwarnings(
    "ignore:swap_optimizer. this torch.optim.SGD keeps no states",
    "ignore:Sparse invariant checks are implicitly disabled",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name: str, dtype: torch.dtype) -> None:
    """Where native takes them: of some parameters, beside dense ones."""

    def make() -> Optimizer:
        return SPARSE[name]([p.detach().to(dtype).requires_grad_() for p in parameters()])

    native, swapped = native_and_swapped(make)

    def load() -> None:
        state_dict = swapped.state_dict()
        native.load_state_dict(state_dict)
        swapped.load_state_dict(copy.deepcopy(state_dict))

    after: dict[int, Callable[[], object]] = {
        5: swapped.reload,  # type: ignore[attr-defined]
        6: swapped.offload,  # type: ignore[attr-defined]
        7: load,
    }
    for step in range(9):
        for optimizer in (native, swapped):
            give_some_sparse(optimizer, step)
            optimizer.step()
        assert_equal_with_sparse_states(native, swapped)
        after.get(step, lambda: None)()
    native, swapped = copy.deepcopy(native), copy.deepcopy(swapped)
    for optimizer in (native, swapped):
        give_some_sparse(optimizer, 9)
        optimizer.step()
    assert_equal_with_sparse_states(native, swapped)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_fused_kernels_take_no_sparse_gradients() -> None:
    (param,) = parameters([(6, 4)])
    optimizer = swap_optimizer(optim.Adagrad([param], fused=True), CONFIG, device=CpuAsDevice())
    param.grad = torch.ones(6, 4).to_sparse()
    with pytest.raises(RuntimeError, match="Adagrad with fused=True does not support sparse"):
        optimizer.step()
