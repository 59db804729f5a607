# SPDX-License-Identifier: Apache-2.0
"""What is done before ``step()``: loads and whole updates in the backward pass, kept batches."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swap_testkit.torch import CopySchedule, CpuAsDevice, assert_same_bits, launch
from swap_torch import SwapOptimizerConfig, swap_optimizer

Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]

WAYS: dict[str, dict[str, Any]] = {
    "prefetch": {"prefetch": "backward"},
    "prefetch per tensor": {"prefetch": "backward", "packed_swap": False},
    "zigzag": {"zigzag": True},
    "zigzag and prefetch": {"zigzag": True, "prefetch": "backward"},
    "overlap": {"overlap_backward": True},
    "overlap per tensor": {"overlap_backward": True, "packed_swap": False},
    "trusted overlap": {"overlap_backward": "trusted"},
}
OVERLAPS = pytest.mark.parametrize("trusted", [True, "trusted"])
EACH_WAY = pytest.mark.parametrize("way", WAYS)


class Net(nn.Module):
    """Eight layers, one of which some inputs skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(8))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = torch.tanh(layer(x))
        return x


def backward(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    net(torch.randn(4, 9, generator=generator)).square().sum().backward()


def plain(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    backward(net, number)
    optimizer.step()


def make(
    way: dict[str, Any],
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    device: CpuAsDevice | None = None,
    **options: Any,
) -> tuple[Net, Any]:
    """A model and its swapped optimizer, of seven batches."""
    net = Net()
    config = SwapOptimizerConfig(**{"swap_times": 7, "min_numel": 0, **way})
    device = device or CpuAsDevice(schedule=CopySchedule.LATEST, poison=True)
    native = kind(net.parameters(), **{"lr": 0.1, **copy.deepcopy(options)})
    return net, swap_optimizer(native, config, device=device)


def both(
    way: dict[str, Any],
    steps: int,
    step: Step = plain,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    device: CpuAsDevice | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Train natively and swapped, without looking in between, and compare."""
    net, swapped = make(way, kind, device, **options)
    twin = Net()
    native = kind(twin.parameters(), **{"lr": 0.1, **copy.deepcopy(options)})
    for number in range(steps):
        step(twin, native, number)
        step(net, swapped, number)
        for p, q in zip(twin.parameters(), net.parameters(), strict=True):
            assert torch.equal(p, q)
    assert_same_bits(native, swapped)
    return net, swapped


@EACH_WAY
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.05)}),
    ],
)
def test_bits_are_those_of_native(
    way: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    both(WAYS[way], 6, plain, kind, **options)


@EACH_WAY
def test_nothing_is_held_once_somebody_looks(way: str) -> None:
    device = CpuAsDevice()
    net, swapped = both(WAYS[way], 5, device=device)
    assert device.held_bytes == 0
    backward(net, 9)
    swapped.state_dict()
    assert device.held_bytes == 0


# Loads in the backward pass.


def loads_before_step(net: nn.Module, optimizer: Any, seed: int) -> int:
    """How many bytes are loaded in a backward pass."""
    before = optimizer._swap.ledger.bytes_loaded
    backward(net, seed)
    loaded: int = optimizer._swap.ledger.bytes_loaded - before
    return loaded


def test_the_first_loads_begin_in_the_backward_pass_from_the_third_update_on() -> None:
    net, optimizer = make({"prefetch": "backward"})
    loaded = []
    for number in range(4):
        optimizer.zero_grad()
        loaded.append(loads_before_step(net, optimizer, number))
        optimizer.step()
    first, second = optimizer.swap_report().batch_bytes[:2]
    assert loaded == [0, 0, first + second, first + second]


def test_with_accumulation_they_begin_in_the_last_backward_pass() -> None:
    net, optimizer = make({"prefetch": "backward"})
    loaded = []
    for number in range(3):
        optimizer.zero_grad()
        loaded.append([loads_before_step(net, optimizer, number) > 0 for _ in range(3)])
        optimizer.step()
    assert loaded == [[False] * 3, [False] * 3, [False, False, True]]


@pytest.mark.parametrize("drop", ["zero_grad", "state", "state_dict", "report", "offload"])
def test_what_was_loaded_ahead_is_given_up_when_it_may_be_stale(drop: str) -> None:
    device = CpuAsDevice()
    net, optimizer = make({"prefetch": "backward"}, device=device)
    for number in range(3):
        plain(net, optimizer, number)
    backward(net, 3)
    assert device.held_bytes > 0
    match drop:
        case "zero_grad":
            optimizer.zero_grad()
        case "state":
            assert optimizer.state
        case "state_dict":
            optimizer.state_dict()
        case "report":
            optimizer.swap_report()
        case "offload":
            optimizer.offload()
    assert device.held_bytes == 0


@pytest.mark.parametrize("way", ["prefetch", "prefetch per tensor"])
def test_states_edited_after_they_were_loaded_ahead_are_not_lost(way: str) -> None:
    """By a reference that was taken out before: nothing tells the optimizer."""
    nets, optimizers = [], []
    for swapped in (False, True):
        net = Net()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
        if swapped:
            net, optimizer = make(WAYS[way])
        for number in range(4):
            plain(net, optimizer, number)
        held = [optimizer.state[p]["exp_avg"] for p in net.parameters()]
        plain(net, optimizer, 4)  # nobody looked since
        optimizer.zero_grad()
        backward(net, 5)
        for tensor in held:
            if not swapped or tensor is not None:
                tensor.fill_(0.25)
        optimizer.step()
        nets.append(net)
        optimizers.append(optimizer)
    assert_same_bits(*optimizers)


def test_a_step_whose_gradients_are_others_than_expected_gives_up_what_was_loaded() -> None:
    def skipping(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        net.skipped = 7 if number == 4 else None
        plain(net, optimizer, number)

    both({"prefetch": "backward"}, 7, skipping)


def test_loading_a_checkpoint_between_backward_and_step_wins() -> None:
    def reloading(net: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        if number == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            plain(net, optimizer, 30)
            optimizer.zero_grad()
            backward(net, number)
            optimizer.load_state_dict(saved)
        else:
            backward(net, number)
        optimizer.step()

    for way in WAYS.values():
        if not way.get("overlap_backward"):
            both(way, 6, reloading)


# Kept batches.


def test_a_kept_batch_is_neither_stored_nor_loaded() -> None:
    device = CpuAsDevice()
    net, optimizer = make({"zigzag": True}, device=device)
    for number in range(2):
        plain(net, optimizer, number)
    ledger = copy.copy(optimizer._swap.ledger)
    held = device.held_bytes
    for number in range(2, 4):
        plain(net, optimizer, number)
    sizes = optimizer._swap._runner.latest[0].batches
    first, last, total = sizes[0].nbytes, sizes[-1].nbytes, sum(b.nbytes for b in sizes)
    now = optimizer._swap.ledger
    assert held > 0
    assert now.bytes_loaded - ledger.bytes_loaded == 2 * total - first - last
    assert now.bytes_stored - ledger.bytes_stored == 2 * total - first - last


@pytest.mark.parametrize("schedule", CopySchedule)
def test_a_kept_batch_comes_home_when_another_plan_runs(schedule: CopySchedule) -> None:
    def skipping(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        net.skipped = number % 3 or None
        plain(net, optimizer, number)

    both({"zigzag": True}, 8, skipping, device=CpuAsDevice(schedule=schedule, poison=True))


# Updates in the backward pass.


def test_batches_are_updated_in_the_backward_pass() -> None:
    net, optimizer = make({"overlap_backward": True})
    for number in range(2):
        plain(net, optimizer, number)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 2)
    changed = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert all(changed)
    after = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), after, strict=True))


def test_the_first_update_that_could_overlap_does_not_but_looks() -> None:
    net, optimizer = make({"overlap_backward": True})
    plain(net, optimizer, 0)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def clip(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)  # scales by exactly 1


def accumulate(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net, 77)


def reduce_unseen(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As DDP: other values, and no version is counted."""
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data.mul_(0.5)


def replace(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad = p.grad.clone()


def scale(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.grad_scale = torch.tensor(1.0)  # type: ignore[attr-defined]  # as GradScaler does


CHANGES = [clip, accumulate, reduce_unseen, replace, scale]


@pytest.mark.parametrize("change", CHANGES)
def test_training_that_changes_gradients_is_refused_before_anything_changed(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    net, optimizer = make({"overlap_backward": True}, fused=True)
    plain(net, optimizer, 0)
    before = [p.detach().clone() for p in net.parameters()]
    states = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    backward(net, 1)
    change(net, optimizer)
    with pytest.raises(ValueError, match=r"=True does not fit .* Nothing was updated"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states["state"][number][key]) for key, value in entry.items())


def job_ddp(bucket_view: bool) -> str:
    """What a training with DDP is told at its second update; each rank has another batch."""
    net, optimizer = make({"overlap_backward": True})
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=bucket_view)
    plain(model, optimizer, 10 * torch.distributed.get_rank())
    try:
        plain(model, optimizer, 10 * torch.distributed.get_rank() + 1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_is_refused(bucket_view: bool) -> None:
    """It reduces gradients after the hooks have run, in place and without counting a version."""
    for told in launch(job_ddp, bucket_view, nproc=2, timeout=120):
        assert "overlap_backward=True does not fit this training" in told


@pytest.mark.parametrize("change", [clip, replace, scale])
def test_a_change_after_an_update_in_the_backward_pass_is_told(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    device = CpuAsDevice()
    net, optimizer = make({"overlap_backward": True}, device=device, fused=True)
    for number in range(3):
        plain(net, optimizer, number)
    optimizer.zero_grad()
    backward(net, 3)
    change(net, optimizer)
    with pytest.raises(RuntimeError, match="changed after the backward pass had updated"):
        optimizer.step()
    assert device.held_bytes == 0


@OVERLAPS
def test_a_second_backward_pass_is_told_where_it_happens(trusted: Any) -> None:
    device = CpuAsDevice()
    net, optimizer = make({"overlap_backward": trusted}, device=device)
    for number in range(3):
        plain(net, optimizer, number)
    optimizer.zero_grad()
    backward(net, 3)
    with pytest.raises(RuntimeError, match="a second backward pass before step"):
        backward(net, 4)
    assert device.held_bytes == 0


def test_another_learning_rate_after_an_update_in_the_backward_pass_is_told() -> None:
    net, optimizer = make({"overlap_backward": True})
    for number in range(3):
        plain(net, optimizer, number)
    optimizer.zero_grad()
    backward(net, 3)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(RuntimeError, match="options of a param group changed after"):
        optimizer.step()


def test_a_trusted_change_is_not_looked_at() -> None:
    net, optimizer = make({"overlap_backward": "trusted"})
    for number in range(4):
        optimizer.zero_grad()
        backward(net, number)
        clip(net, optimizer)
        optimizer.step()


@OVERLAPS
def test_a_layer_without_gradients_is_left_alone(trusted: Any) -> None:
    def skipping(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        net.skipped = {3: 2, 4: 7, 6: 0}.get(number)
        plain(net, optimizer, number)

    both({"overlap_backward": trusted}, 9, skipping)


@OVERLAPS
def test_looking_at_states_in_the_middle_of_a_backward_pass_is_harmless(trusted: Any) -> None:
    def looking(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        layer = net.layers[4]
        looked = []
        handle = layer.register_full_backward_hook(lambda *_: looked.append(len(optimizer.state)))
        backward(net, number)
        handle.remove()
        assert looked
        optimizer.step()

    both({"overlap_backward": trusted}, 6, looking)


@OVERLAPS
def test_a_checkpoint_is_not_loaded_between_updates_and_step(trusted: Any) -> None:
    net, optimizer = make({"overlap_backward": trusted})
    for number in range(3):
        plain(net, optimizer, number)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    backward(net, 3)
    with pytest.raises(RuntimeError, match=r"16 parameters are updated already. Call step"):
        optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.load_state_dict(saved)


@OVERLAPS
def test_states_put_in_place_between_updates_and_step_update_nothing_twice(trusted: Any) -> None:
    net, optimizer = make({"overlap_backward": trusted})
    for number in range(3):
        plain(net, optimizer, number)
    entry = optimizer.state[net.layers[0].weight]
    plain(net, optimizer, 3)  # nobody looked since
    optimizer.zero_grad()
    backward(net, 4)
    entry["exp_avg"] = entry["exp_avg"].clone()
    optimizer.step()
    assert {entry["step"].item() for entry in optimizer.state.values()} == {5.0}


def test_a_skipped_step_updates_what_the_backward_pass_left_only_when_it_is_made() -> None:
    net, optimizer = make({"overlap_backward": True})
    for number in range(3):
        plain(net, optimizer, number)
    optimizer.zero_grad()
    backward(net, 3)
    with pytest.warns(RuntimeWarning, match=r"16 parameters were updated in .* is now skipped"):
        optimizer.zero_grad()
    backward(net, 4)
    optimizer.step()
    assert {entry["step"].item() for entry in optimizer.state.values()} == {5.0}


@OVERLAPS
def test_a_skipped_step_is_told_once_and_where_the_gradients_are_dropped(trusted: Any) -> None:
    net, optimizer = make({"overlap_backward": trusted})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            plain(net, optimizer, number)
        assert caught == []
        for number in range(2):
            backward(net, number)
            optimizer.zero_grad()
            optimizer.zero_grad()
            plain(net, optimizer, number)
    assert [(each.category, each.filename) for each in caught] == [(RuntimeWarning, __file__)]


def test_a_step_with_other_gradients_than_expected_is_not_told_as_skipped() -> None:
    def skipping(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        net.skipped = 2 if number == 4 else None
        plain(net, optimizer, number)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both({"overlap_backward": True}, 6, skipping)


@OVERLAPS
def test_a_group_is_not_added_between_updates_and_step(trusted: Any) -> None:
    net, optimizer = make({"overlap_backward": trusted})
    for number in range(3):
        plain(net, optimizer, number)
    optimizer.zero_grad()
    backward(net, 3)
    group = {"params": [nn.Parameter(torch.ones(9))]}
    with pytest.raises(RuntimeError, match=r"add_param_group between .* 16 parameters"):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    optimizer.add_param_group(group)


@OVERLAPS
def test_a_group_is_added_where_nothing_is_updated_yet(trusted: Any) -> None:
    """The first batch waits for a gradient that does not come."""

    def adding(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        net.skipped = 7 if number == 3 else None
        optimizer.zero_grad()
        backward(net, number)
        if number == 3:
            extra = nn.Parameter(torch.ones(9))
            extra.grad = torch.ones(9)
            optimizer.add_param_group({"params": [extra]})
        optimizer.step()

    both({"overlap_backward": trusted}, 6, adding)


@EACH_WAY
def test_hooks_on_parameters_do_not_keep_the_optimizer_alive(way: str) -> None:
    net, optimizer = make(WAYS[way])
    for number in range(3):
        plain(net, optimizer, number)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    backward(net, 9)


@EACH_WAY
def test_copies_are_independent(way: str) -> None:
    net, optimizer = make(WAYS[way], device=CpuAsDevice())
    for number in range(4):
        plain(net, optimizer, number)
    net2, optimizer2 = copy.deepcopy((net, optimizer))
    for number in range(4, 7):
        plain(net, optimizer, number)
        plain(net2, optimizer2, number)
    assert_same_bits(optimizer, optimizer2)


@pytest.mark.parametrize("way", ["prefetch", "budget"])
def test_optimizers_that_run_their_own_step_load_ahead_too(way: str) -> None:
    fields: dict[str, Any] = {"prefetch": "backward"}
    if way == "budget":
        fields["device_budget"] = 0.4
    both(fields, 5, kind=torch.optim.NAdam)


@pytest.mark.parametrize("way", ["zigzag", "overlap"])
def test_optimizers_that_run_their_own_step_keep_their_order(way: str) -> None:
    with pytest.raises(ValueError, match=r"changes the order of .*NAdam may not"):
        make(WAYS[way], torch.optim.NAdam)
