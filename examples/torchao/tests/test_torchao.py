# SPDX-License-Identifier: Apache-2.0
"""torchao's optimizers with quantized states, native and swapped.

torchao compiles the update of a parameter, for each shape. That takes longer than all else here, so
it runs uncompiled but in one test.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim
from _sharded import save_and_load_sharded, train_sharded

from swap_core import UnsupportedOptimizerError, align
from swap_testkit.torch import CpuAsDevice, assert_same_bits, launch
from swap_testkit.torch.laws import LAWS, Subject, check_law
from swap_torch import SwapOptimizerConfig, swap_optimizer

torch.set_num_threads(1)

# Quantized: at least 4096 elements, a multiple of the block size (256, of 4 bits 128).
SHAPES = ((64, 64), (33,), (16, 272), (7, 3))
OPTIONS = {"lr": 0.003, "betas": (0.8, 0.9), "weight_decay": 0.1}
# torch's deepcopy clones such states, which torchao's cannot.
COPYABLE = [law for law in LAWS if law != "copies"]
CASES = [
    *(("AdamW8bit", law) for law in COPYABLE),
    *(("AdamW4bit", law) for law in ("bits", "state dicts")),
    *(("AdamWFp8", law) for law in ("bits", "state dicts")),
    *((name, "bits") for name in ("Adam8bit", "Adam4bit", "AdamFp8")),
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def parameters(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def make(name: str, *, amsgrad: bool = False, **options: Any) -> Any:
    return getattr(torchao.optim, name)(parameters(**options), amsgrad=amsgrad)


def swapped(optimizer: Any, **fields: Any) -> Any:
    config = SwapOptimizerConfig(**{"min_numel": 2, "swap_times": 3, **fields})
    return swap_optimizer(optimizer, config, device=CpuAsDevice(poison=True))


def train(optimizers: list[Any], steps: int) -> None:
    """Step each of them, with the same gradients and random numbers."""
    for step in range(steps):
        for optimizer in optimizers:
            torch.manual_seed(step)
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.randn(param.shape).to(param.dtype)
            optimizer.step()
        for optimizer in optimizers[1:]:
            assert_same_bits(optimizers[0], optimizer)


@pytest.mark.parametrize(("name", "law"), CASES)
@pytest.mark.usefixtures("uncompiled")
def test_law(name: str, law: str) -> None:
    kind = getattr(torchao.optim, name)
    check_law(law, Subject(partial(kind, lr=0.01), shapes=SHAPES, group_options=(OPTIONS,)))


# torch's own, about what its compiler imports, and about torchao's states in its cache.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:OptimState8bit does not implement")
def test_compiled_updates_have_native_bits_and_are_compiled_once() -> None:
    native, packed, each = (make("AdamW8bit", shapes=((64, 64), (33,))) for _ in range(3))
    train([native], 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        ours = [swapped(packed, packed_swap=True), swapped(each, packed_swap=False)]
        train(ours, 4)
    train_native_on(native, 4)
    for optimizer in ours:
        assert_same_bits(native, optimizer)


def train_native_on(native: Any, steps: int) -> None:
    """From the second step on, with the gradients of ``train``."""
    for step in range(1, steps):
        torch.manual_seed(step)
        for param in native.param_groups[0]["params"]:
            param.grad = torch.randn(param.shape).to(param.dtype)
        native.step()


@pytest.mark.parametrize(
    ("name", "code_bits", "block", "table"),
    [("AdamW8bit", 8, 256, 4 * 256), ("AdamW4bit", 4, 128, 4 * 16), ("AdamWFp8", 8, 256, 0)],
)
@pytest.mark.usefixtures("uncompiled")
def test_bytes_by_formula(name: str, code_bits: int, block: int, table: int) -> None:
    """Codes, a scale for each block, a table, each at an aligned offset."""
    optimizer = swapped(make(name, shapes=((128, 256),)))
    train([optimizer], 1)
    memories = [128 * 256 * code_bits // 8, 128 * 256 // block * 4, *([table] if table else [])]
    nbytes = sum(map(align, memories[:-1])) + memories[-1]
    report = optimizer.swap_report()
    assert [(state.key, state.nbytes) for state in report.states] == [
        ("exp_avg", nbytes),
        ("exp_avg_sq", nbytes),
    ]
    assert report.host_bytes == 2 * align(nbytes)
    assert report.idle_device_bytes == 0


@pytest.mark.usefixtures("uncompiled")
def test_amsgrad_where_no_state_is_quantized() -> None:
    native, ours = (make("AdamW8bit", shapes=((33,), (7, 3)), amsgrad=True) for _ in range(2))
    train([native, swapped(ours)], 3)
    report = ours.swap_report()
    keys = [state.key for state in report.states if state.stays is None]
    assert keys == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] * 2
    assert report.idle_device_bytes == 0


@pytest.mark.usefixtures("uncompiled")
def test_stochastic_rounding_takes_the_same_random_numbers() -> None:
    options = {"bf16_stochastic_round": True, "lr": 0.01}
    native, ours = (
        torchao.optim.AdamW8bit(parameters(dtype=torch.bfloat16), **options) for _ in range(2)
    )
    train([native, swapped(ours)], 4)


@pytest.mark.usefixtures("uncompiled")
def test_a_state_that_stays_is_saved_as_it_was() -> None:
    native, ours = (make("AdamW8bit") for _ in range(2))
    swapped(ours, device_budget=20_000)
    train([native, ours], 2)
    assert 0 < ours.swap_report().resident_bytes <= 20_000
    held = ours.state_dict()
    saved = copy_of(held)
    train([native, ours], 2)
    assert copy_of(held) == saved


def copy_of(state_dict: dict[str, Any]) -> list[bytes]:
    states = [entry["exp_avg"] for entry in state_dict["state"].values()]
    return [
        memory.numpy().tobytes()
        for state in states
        for memory in ([state.codes, state.scale] if hasattr(state, "codes") else [state])
    ]


@pytest.mark.usefixtures("uncompiled")
def test_states_of_float32_parameters_are_loaded_for_bfloat16() -> None:
    source = swapped(make("AdamW8bit"))
    train([source], 2)
    native, ours = (make("AdamW8bit", dtype=torch.bfloat16) for _ in range(2))
    swapped(ours)
    for optimizer in (native, ours):
        optimizer.load_state_dict(source.state_dict())
    assert_same_bits(native, ours)
    train([native, ours], 2)


@pytest.mark.parametrize("make_it", ["native", "swapped"])
@pytest.mark.usefixtures("uncompiled")
def test_what_torchao_cannot_do_it_cannot_swapped(make_it: str) -> None:
    """Copy such states, and amsgrad with them."""
    optimizer = make("AdamW8bit")
    amsgrad = make("AdamW8bit", amsgrad=True)
    if make_it == "swapped":
        swapped(optimizer)
        swapped(amsgrad)
    train([optimizer], 1)
    with pytest.raises(NotImplementedError, match=r"aten\.clone"):
        copy.deepcopy(optimizer)
    with pytest.raises(NotImplementedError, match=r"aten\.maximum"):
        train([amsgrad], 1)


def test_sharded_by_fsdp2_with_shards_that_are_quantized_in_one_process_only() -> None:
    launch(train_sharded, nproc=2)


def test_checkpoints_of_sharded_states_load_each_into_each(tmp_path: Path) -> None:
    launch(save_and_load_sharded, str(tmp_path), nproc=2)


def test_the_optimizer_for_quantized_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="for quantized parameters"):
        swap_optimizer(torchao.optim._AdamW(parameters()))
