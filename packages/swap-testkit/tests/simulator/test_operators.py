# SPDX-License-Identifier: Apache-2.0
"""Operators: the CPU's numbers, on another device, behind the host's back."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swap_testkit.torch import simulator
from swap_testkit.torch.simulator import NPU_QUIRKS, Quirks, Schedule

DEVICE = "simnpu"
Compute = Callable[[Any], Any]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


OPERATORS: dict[str, Compute] = {
    "arithmetic": lambda t: (t + 2) * t - t / 3 + 1.5 * t,
    "integers and a float": lambda t: t.to(torch.int32) * 1.5,
    "in place": lambda t: t.clone().add_(t, alpha=2).mul_(3).addcmul_(t, t, value=0.5),
    "in place on a view": lambda t: t.clone().t()[1:].sub_(1),
    "matrices": lambda t: t @ t.t() + torch.addmm(t @ t, t, t),
    "batched": lambda t: torch.bmm(t.expand(3, 8, 8), t.expand(3, 8, 8)),
    "reductions": lambda t: (t.sum(), t.mean(0), t.amax(1), t.norm(), t.argmax(), t.std()),
    "comparison": lambda t: (t > 0, torch.where(t > 0, t, -t), t.clamp(-1, 1)),
    "shapes": lambda t: (t.reshape(4, 16), t.permute(1, 0).contiguous(), t.unfold(0, 2, 2)),
    "joining": lambda t: (torch.cat([t, t]), torch.stack([t, t], 1), *t.split(3)),
    "indexing": lambda t: (t[[1, 2]], t[t > 0], t.gather(0, t.argsort(0)), t[1, 2:5]),
    "index_put": lambda t: t.clone().index_put_((torch.tensor([1, 2]),), torch.tensor(7.0)),
    "sorting": lambda t: (*t.sort(), *t.topk(2)),
    "softmax": lambda t: (t.softmax(-1), t.log_softmax(0)),
    "norms": lambda t: (F.layer_norm(t, (8,)), F.group_norm(t, 2), F.rms_norm(t, (8,))),
    "activations": lambda t: (F.gelu(t), F.silu(t), F.relu(t), t.tanh(), t.sigmoid()),
    "convolution": lambda t: F.conv2d(t.view(1, 1, 8, 8), t[:3, :3].reshape(1, 1, 3, 3)),
    "attention": lambda t: F.scaled_dot_product_attention(*[t.view(1, 2, 4, 8)] * 3),
    "loss": lambda t: F.cross_entropy(t, t.argmax(1)) + F.mse_loss(t, t * 2),
    "complex": lambda t: torch.view_as_real(
        torch.view_as_complex(t.view(8, 4, 2)).conj() * torch.view_as_complex(t.view(8, 4, 2))
    ),
    "lazy conjugation": lambda t: torch.view_as_complex(t.view(8, 4, 2)).conj().resolve_conj(),
    "lazy negation": lambda t: torch.view_as_complex(t.view(8, 4, 2)).conj().imag.resolve_neg(),
    "factories": lambda t: (
        torch.arange(5, device=t.device),
        torch.linspace(0, 1, 4, device=t.device),
        torch.eye(3, device=t.device),
        torch.full((2,), 3, device=t.device),
        torch.tril(torch.ones(3, 3, device=t.device)),
    ),
    "out": lambda t: torch.add(t, t, out=torch.empty(8, 8, device=t.device)),
    "out that grows": lambda t: torch.add(t, t, out=torch.empty(0, device=t.device)),
    "shapes that depend on values": lambda t: (t.nonzero(), t.masked_select(t > 0), t.unique()),
    "host values": lambda t: torch.tensor([t.sum().item(), float(torch.equal(t, t))]),
    "foreach": lambda t: torch._foreach_mul([t, t], [2.0, 3.0]),
    "to another type": lambda t: (t.half(), t.double(), t.to(torch.bfloat16).float()),
    "cumulative": lambda t: (t.cumsum(0), t.cumprod(1)),
}


def on_cpu(result: Any) -> list[torch.Tensor]:
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_the_cpus(name: str, schedule: Schedule) -> None:
    compute = OPERATORS[name]
    base = values(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of outs that grow
        expected, found = on_cpu(compute(base)), on_cpu(compute(base.to(DEVICE)))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_results_are_remembered_by_everything_that_decides_their_shape() -> None:
    base = values(8, 8).to(DEVICE)
    for _ in range(2):
        assert torch.arange(0, 4.0, 1.0, device=DEVICE).numel() == 4
        assert torch.arange(0, 6.0, 1.0, device=DEVICE).numel() == 6
        assert base.sum(0).shape == (8,)
        assert base.sum(1, keepdim=True).shape == (8, 1)
        assert (base.int() * 2.0).dtype == torch.float32
        assert (base.int() * 2).dtype == torch.int32
        assert (base.int() * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float64
        assert base.t().contiguous().stride() == (8, 1)


def test_wrong_arguments_raise_at_once(schedule: Schedule) -> None:
    base = values(8, 8).to(DEVICE)
    with pytest.raises(RuntimeError, match="size of tensor"):
        base.add_(torch.ones(3, device=DEVICE))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        base @ values(3, 3).to(DEVICE)
    with pytest.raises(RuntimeError, match=r"at least two devices, simnpu:0 and cpu"):
        base + values(8, 8)
    with pytest.raises(RuntimeError, match=r"simnpu:0 and simnpu:1"):
        base + values(8, 8).to(f"{DEVICE}:1")


def test_what_is_not_simulated_raises() -> None:
    with pytest.raises(RuntimeError, match="Sparsesimnpu"):
        torch.empty(2, 2, layout=torch.sparse_coo, device=DEVICE)
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device=DEVICE, pin_memory=True)
    with pytest.raises(NotImplementedError, match="events between processes"):
        torch.get_device_module(DEVICE).Event(interprocess=True)
    with pytest.warns(UserWarning, match="Disabling autocast"):
        torch.autocast(DEVICE, dtype=torch.bfloat16).__enter__().__exit__(None, None, None)


def test_what_ran_in_step_with_the_host_is_counted() -> None:
    def counted(compute: Callable[[torch.Tensor], object]) -> tuple[dict[str, int], int]:
        base = values(8, 8).to(DEVICE)
        before, queued = simulator.fallbacks(), simulator.queued_operations()
        compute(base)
        after = simulator.fallbacks()
        new = {name: n - before.get(name, 0) for name, n in after.items()}
        return {k: n for k, n in new.items() if n}, simulator.queued_operations() - queued

    assert counted(lambda t: t.add(t).mul(2)) == ({}, 2)
    assert counted(lambda t: (t.nonzero(), t.nonzero())) == ({"nonzero": 2}, 0)


# Random numbers.


def test_random_numbers_are_the_devices_own() -> None:
    module = torch.get_device_module(DEVICE)
    torch.manual_seed(1)
    state, host_state = module.get_rng_state(), torch.get_rng_state()
    assert (state.dtype, state.numel(), state.device.type) == (torch.uint8, 16, "cpu")
    first = torch.randn(4, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), host_state)
    assert not torch.equal(first, torch.randn(4, device=DEVICE))
    module.set_rng_state(state)
    assert torch.equal(first, torch.randn(4, device=DEVICE))
    assert module.initial_seed() == 1
    assert not torch.equal(module.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="16"):
        module.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_random_numbers_do_not_depend_on_the_schedule() -> None:
    found = []
    for schedule in Schedule:
        simulator.set_schedule(schedule, seed=5)
        torch.manual_seed(3)
        layers = [torch.rand(5, device=DEVICE), torch.ones(50, device=DEVICE)]
        layers[1] = F.dropout(layers[1])
        layers.append(torch.multinomial(layers[0], 3))
        layers.append(torch.randperm(9, device=DEVICE))
        layers.append(torch.empty(4, device=DEVICE).exponential_())
        found.append([layer.cpu() for layer in layers])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_generator_of_ones_own() -> None:
    one, other = (torch.Generator(device=DEVICE).manual_seed(9) for _ in range(2))
    first = torch.randn(3, device=DEVICE, generator=one)
    assert torch.equal(first, torch.randn(3, device=DEVICE, generator=other))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())


def test_dropout_has_a_backward(schedule: Schedule) -> None:
    base = torch.ones(100, device=DEVICE, requires_grad=True)
    dropped = F.dropout(base, 0.25)
    dropped.sum().backward()
    assert base.grad is not None
    assert torch.equal(base.grad, dropped.detach())


def test_convolution_has_a_backward(schedule: Schedule) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        layer = nn.Conv2d(2, 3, 3)
        with torch.no_grad():
            layer.weight.copy_(values(3, 2, 3, 3))
            layer.bias.zero_()
        layer.to(device)
        layer(values(1, 2, 5, 5).to(device)).square().sum().backward()
        return [param.grad.cpu() for param in layer.parameters()]

    for ours, theirs in zip(gradients(DEVICE), gradients("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


# Trainers' needs.


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_network_trains_as_on_the_cpu(options: dict[str, bool], schedule: Schedule) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for step in range(3):
            model(values(8, 16, seed=step).to(device)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().cpu() for param in model.parameters()]

    for ours, theirs in zip(train(DEVICE), train("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_checkpoints_go_to_a_file_and_back() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["weight"].device.type == DEVICE
    assert torch.equal(loaded["weight"], model.weight)
    assert torch.equal(copy.deepcopy(model).weight, model.weight)


def test_gradient_scaling_skips_a_step_with_an_inf() -> None:
    weight = nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(weight.detach().cpu(), torch.ones(4))


def test_a_fused_kernel_that_ignores_the_scaler() -> None:
    def updated(found_inf: float) -> torch.Tensor:
        params, grads, avgs, squares = (
            [torch.full((4,), x, device=DEVICE)] for x in (1.0, 1.0, 0.0, 0.0)
        )
        step = [torch.ones((), device=DEVICE)]
        torch._fused_adamw_(
            params, grads, avgs, squares, [], step, amsgrad=False, lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, maximize=False,
            grad_scale=torch.ones(1, device=DEVICE),
            found_inf=torch.full((1,), found_inf, device=DEVICE),
        )  # fmt: skip
        return params[0].cpu()

    assert torch.equal(updated(1.0), torch.ones(4))
    simulator.set_quirks(Quirks(fused_ignores_scaler=True))
    assert torch.equal(updated(1.0), updated(0.0))
    assert not torch.equal(updated(1.0), torch.ones(4))
    assert NPU_QUIRKS.fused_ignores_scaler
