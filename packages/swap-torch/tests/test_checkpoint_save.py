# SPDX-License-Identifier: Apache-2.0
"""``state_dict()``: what it holds, what it costs, and that training does not change it."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.optim import Adam, AdamW, Optimizer

from swap_testkit import Tamper
from swap_testkit.torch import CopySchedule, CpuAsDevice, TorchRecordingDevice, same_bits
from swap_torch import SwapOptimizerConfig

SHAPES = [(3, 50), (), (40,), (7, 2), (200,)]
BOTH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])


def config(packed: bool = True, **options: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(**{"min_numel": 8, "swap_times": 3, **options}, packed_swap=packed)


def leaves(thing: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dicts, lists and tuples, with the way there and the types on it."""
    if isinstance(thing, dict):
        yield path, [type(thing), *thing]
        for key, value in thing.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(thing, list | tuple):
        yield path, [type(thing), len(thing)]
        for index, value in enumerate(thing):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, thing


def assert_equal(found: Any, expected: Any) -> None:
    """The same structure, in the same order, and the same bits."""
    for (path, value), (wanted_path, wanted) in zip(leaves(found), leaves(expected), strict=True):
        assert path == wanted_path
        assert type(value) is type(wanted), path
        assert same_bits(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, (
            path
        )


def tensors_of(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [value for _, value in leaves(state_dict) if isinstance(value, torch.Tensor)]


# What it holds.


OPTIONS = {
    "plain": (AdamW, {}),
    "adam": (Adam, {"weight_decay": 0.1}),
    "amsgrad": (AdamW, {"amsgrad": True}),
    "fused": (AdamW, {"fused": True}),
    "tensor lr": (AdamW, {"lr": torch.tensor(0.1)}),
    "tensor betas": (AdamW, {"betas": (torch.tensor(0.8), torch.tensor(0.9)), "foreach": False}),
}


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("options", OPTIONS)
def test_structure_and_values_are_native(
    twins: Callable[..., Any],
    train: Callable[..., None],
    options: str,
    dtype: str,
    packed: bool,
) -> None:
    kind, arguments = OPTIONS[options]
    if options == "fused" and dtype == "complex64":
        dtype = "float64"  # native refuses complex parameters
    groups = [{"params": SHAPES[:2], "lr": 0.3}, {"params": SHAPES[2:]}]
    dtypes = [getattr(torch, dtype), torch.float32]
    pair = twins(groups, kind, dtype=dtypes, config=config(packed), **arguments)
    assert_equal(pair.swapped.state_dict(), pair.native.state_dict())  # without states
    train(pair, 2, [True, True, False, True, True])
    state_dict = pair.swapped.state_dict()
    assert_equal(state_dict, pair.native.state_dict())
    assert {tensor.device.type for tensor in tensors_of(state_dict)} == {"cpu"}


@pytest.mark.parametrize("swap_times", [1, 100])
@pytest.mark.parametrize("min_numel", [0, 100, 10**6])
@pytest.mark.parametrize("state_keys", [None, ("exp_avg",)])
@pytest.mark.filterwarnings("ignore:swap_optimizer. none of the")
@BOTH
def test_it_does_not_depend_on_the_config(
    twins: Callable[..., Any],
    train: Callable[..., None],
    state_keys: tuple[str, ...] | None,
    min_numel: int,
    swap_times: int,
    packed: bool,
) -> None:
    how = config(packed, swap_times=swap_times, min_numel=min_numel, state_keys=state_keys)
    pair = twins(SHAPES, config=how, fused=True)
    train(pair, 2)
    state_dict = pair.swapped.state_dict()
    expected = copy.deepcopy(pair.native.state_dict())
    assert_equal(state_dict, expected)
    for tensor in tensors_of(state_dict):
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    train(pair, 2)
    assert_equal(state_dict, expected)


def test_names_are_in_it(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    def named() -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, torch.nn.Parameter(torch.ones(20))) for name in ("a.weight", "a.bias")]

    pair = twins(named, config=config())
    train(pair, 1)
    state_dict = pair.swapped.state_dict()
    assert_equal(state_dict, pair.native.state_dict())
    assert state_dict["param_groups"][0]["param_names"] == ["a.weight", "a.bias"]


def test_hooks_see_and_change_it_once(
    twins: Callable[..., Any], train: Callable[..., None]
) -> None:
    calls: list[str] = []

    def attach(optimizer: Optimizer) -> None:
        def before(optimizer: Optimizer) -> None:
            calls.append("pre")
            first = optimizer.param_groups[0]["params"][0]
            optimizer.state[first]["exp_avg"].mul_(2)

        def after(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            calls.append("post")
            kept.append(state_dict)
            return {**state_dict, "note": 1}

        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_state_dict_post_hook(after)

    kept: list[dict[str, Any]] = []
    pair = twins(SHAPES, config=config(), prepare=attach)
    train(pair, 1)
    dicts = [pair.native.state_dict(), pair.swapped.state_dict()]
    assert calls == ["pre", "post"] * 2
    assert_equal(dicts[1], dicts[0])
    assert dicts[1]["note"] == 1
    expected = copy.deepcopy(kept[1])
    train(pair, 1)
    assert_equal(kept[1], expected)  # a hook keeps a snapshot too


def test_a_subclass_may_add_to_it(twins: Callable[..., Any], train: Callable[..., None]) -> None:
    class Noting(AdamW):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "note": 5}

    pair = twins(SHAPES, Noting, config=config())
    train(pair, 1)
    assert_equal(pair.swapped.state_dict(), pair.native.state_dict())
    assert pair.swapped.state_dict()["note"] == 5


# What training does to it.


@BOTH
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for-loop"])
def test_later_steps_do_not_change_it(
    twins: Callable[..., Any], train: Callable[..., None], fused: bool, packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed), fused=fused, lr=torch.tensor(0.1))
    taken = []
    for number in range(4):
        train(pair, 1, lambda step, position: position == 0 or (position + step) % 3 != 0)
        taken.append((pair.swapped.state_dict(), copy.deepcopy(pair.native.state_dict())))
        for optimizer in (pair.native, pair.swapped):
            optimizer.param_groups[0]["lr"].mul_(0.5)  # as schedulers do
        if number == 2:
            del taken[0]
    train(pair, 2)
    assert len(taken) == 3
    for state_dict, expected in taken:
        assert_equal(state_dict, expected)


@BOTH
@pytest.mark.parametrize(
    "how", ["detach", "numpy", "view", "storage", "dlpack"], ids=lambda how: f"as {how}"
)
def test_later_steps_do_not_change_what_was_made_of_it(
    twins: Callable[..., Any], train: Callable[..., None], how: str, packed: bool
) -> None:
    """A saver need not hold the tensors that it was given."""
    make: dict[str, Callable[[torch.Tensor], Any]] = {
        "detach": torch.Tensor.detach,
        "numpy": torch.Tensor.numpy,
        "view": lambda tensor: tensor.view(-1)[3:9],
        "storage": torch.Tensor.untyped_storage,
        "dlpack": lambda tensor: torch.from_dlpack(tensor.numpy()),
    }
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    state_dict = pair.swapped.state_dict()
    made = [make[how](state_dict["state"][0]["exp_avg"])]
    del state_dict
    before = [bytes(made[0]) if how == "storage" else copy.deepcopy(made[0])]
    train(pair, 2)
    if how == "storage":
        assert bytes(made[0]) == before[0]
    else:
        assert (made[0] == before[0]).all()


@BOTH
def test_loading_does_not_change_it(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """A backup, some other states, and back."""
    pair = twins(SHAPES, config=config(packed))
    train(pair, 1)
    early = copy.deepcopy(pair.native.state_dict())
    train(pair, 2)
    backup = pair.swapped.state_dict()
    expected = copy.deepcopy(pair.native.state_dict())
    for optimizer in (pair.native, pair.swapped):
        optimizer.load_state_dict(copy.deepcopy(early))
    train(pair, 2)
    assert_equal(backup, expected)
    pair.native.load_state_dict(copy.deepcopy(expected))
    pair.swapped.load_state_dict(backup)
    pair.check()
    train(pair, 2)
    assert_equal(backup, expected)


@BOTH
def test_between_updates_it_shows_the_optimizer_as_natively(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """Values that are written into it are used by the next update, which then leaves it alone."""
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    dicts = [pair.native.state_dict(), pair.swapped.state_dict()]
    for state_dict in dicts:
        state_dict["state"][0]["exp_avg"].fill_(0.5)
    pair.check()
    train(pair, 1)
    assert (dicts[1]["state"][0]["exp_avg"] == 0.5).all()


@BOTH
def test_an_asynchronous_saver(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """A thread that is slower than the training, and holds the state dict all the time."""
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    expected = copy.deepcopy(pair.native.state_dict())
    trained = threading.Event()
    files: list[bytes] = []

    def save(state_dict: dict[str, Any]) -> None:
        assert trained.wait(30)
        file = io.BytesIO()
        torch.save(state_dict, file)
        files.append(file.getvalue())

    saver = threading.Thread(target=save, args=(pair.swapped.state_dict(),))
    saver.start()
    train(pair, 3)
    trained.set()
    saver.join(30)
    assert_equal(torch.load(io.BytesIO(files[0]), weights_only=True), expected)


@BOTH
def test_a_tensor_that_is_passed_to_another_process(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    """Doing so moves its storage to shared memory. That of the optimizer stays."""
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    expected = copy.deepcopy(pair.native.state_dict())
    state_dict = pair.swapped.state_dict()
    for tensor in tensors_of(state_dict):
        tensor.share_memory_()
    for optimizer in (pair.native, pair.swapped):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(2)
    again = pair.swapped.state_dict()
    assert_equal(again, pair.native.state_dict())
    train(pair, 2)
    assert_equal(state_dict, expected)


# What it costs.


@pytest.fixture
def device() -> TorchRecordingDevice:
    return TorchRecordingDevice(CpuAsDevice(schedule=CopySchedule.LATEST))


@BOTH
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for-loop"])
def test_saving_and_loading_copies_nothing_between_host_and_device(
    twins: Callable[..., Any],
    train: Callable[..., None],
    device: TorchRecordingDevice,
    fused: bool,
    packed: bool,
) -> None:
    pair = twins(SHAPES, config=config(packed), device=device, fused=fused)
    train(pair, 2)
    pair.swapped.state  # noqa: B018  # stores of the last update are done
    done = len(device.log)
    assert done > 0
    file = io.BytesIO()
    torch.save(pair.swapped.state_dict(), file)
    file.seek(0)
    pair.swapped.load_state_dict(torch.load(file, weights_only=True))
    pair.swapped.load_state_dict(pair.native.state_dict())
    copy.deepcopy(pair.swapped.state_dict())
    assert len(device.log) == done  # no verb at all


def held(device: Any) -> int:
    return int(device.host_bytes)


@BOTH
def test_one_that_is_dropped_before_the_next_update_costs_nothing(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    pair.swapped.state_dict()
    before = pair.swapped.swap_report().ledger
    for _ in range(3):
        torch.save(pair.swapped.state_dict(), io.BytesIO())
        pair.swapped.state_dict()
        train(pair, 1)
    after = pair.swapped.swap_report().ledger
    assert before.host_allocations == after.host_allocations
    assert before.plans_built == after.plans_built
    assert held(pair.device) == after.host_bytes == before.host_bytes


@BOTH
def test_those_of_one_step_cost_one_copy_while_any_lives(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    states = held(pair.device)
    several = [pair.swapped.state_dict() for _ in range(3)]
    assert held(pair.device) == states  # nothing is copied yet
    train(pair, 1)
    assert held(pair.device) == 2 * states
    train(pair, 3)
    assert held(pair.device) == 2 * states
    assert pair.swapped.swap_report().host_bytes == states
    plans = pair.swapped.swap_report().ledger.plans_built
    del several[0], several[0]
    train(pair, 1)
    assert held(pair.device) == 2 * states
    several.clear()
    assert held(pair.device) == states  # at once, not at the next update
    train(pair, 1)
    assert pair.swapped.swap_report().ledger.plans_built == plans


@BOTH
def test_one_tensor_of_it_costs_what_it_takes(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool
) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    states = held(pair.device)
    kept = pair.swapped.state_dict()["state"][0]["exp_avg"]
    before = kept.clone()
    for _ in range(3):
        train(pair, 1)
        assert held(pair.device) == states + 1024  # 150 floats, aligned
    assert torch.equal(kept, before)
    copies = pair.device.copies_in
    train(pair, 1)
    # A hole in its batch: two runs instead of one, and the moved state's own.
    assert pair.device.copies_in - copies <= (3 + 2 if packed else 8)


@BOTH
def test_an_allocation_that_fails_changes_nothing(
    twins: Callable[..., Any],
    train: Callable[..., None],
    device: TorchRecordingDevice,
    packed: bool,
) -> None:
    pair = twins(SHAPES, config=config(packed), device=device)
    train(pair, 2)
    state_dict = pair.swapped.state_dict()
    expected = copy.deepcopy(pair.native.state_dict())
    pair.give_gradients()
    device.tamper = Tamper("allocate_host", 0, MemoryError("no host memory"))
    with pytest.raises(MemoryError, match="no host memory"):
        pair.swapped.step()
    device.tamper = None
    pair.check()
    pair.native.step()
    pair.swapped.step()
    pair.check()
    assert_equal(state_dict, expected)


# Files.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@BOTH
def test_files_have_natives_size_and_need_weights_only(
    twins: Callable[..., Any], train: Callable[..., None], packed: bool, dtype: torch.dtype
) -> None:
    pair = twins(SHAPES, config=config(packed), dtype=dtype, amsgrad=True)
    train(pair, 2)
    files = []
    for optimizer in (pair.native, pair.swapped):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        files.append(file)
    assert files[1].tell() == files[0].tell()
    for file in files:
        file.seek(0)
        assert_equal(torch.load(file, weights_only=True), pair.native.state_dict())


def flattened(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"state.{index}.{key}": value
        for index, entry in state_dict["state"].items()
        for key, value in entry.items()
    }


@BOTH
def test_safetensors(twins: Callable[..., Any], train: Callable[..., None], packed: bool) -> None:
    pair = twins(SHAPES, config=config(packed))
    train(pair, 2)
    files = [safetensors.torch.save(flattened(o.state_dict())) for o in (pair.native, pair.swapped)]
    assert files[1] == files[0]
    tensors = safetensors.torch.load(files[1])
    state_dict = pair.native.state_dict()
    state = {
        index: {key: tensors[f"state.{index}.{key}"] for key in entry}
        for index, entry in state_dict["state"].items()
    }
    fresh = twins(SHAPES, config=config(packed))
    for (p, q), (r, s) in zip(pair.pairs(), fresh.pairs(), strict=True):
        r.data.copy_(p)
        s.data.copy_(q)
    fresh.swapped.load_state_dict({**state_dict, "state": state})
    fresh.native.load_state_dict({**state_dict, "state": copy.deepcopy(state)})
    train(fresh, 2)
