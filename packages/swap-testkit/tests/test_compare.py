# SPDX-License-Identifier: Apache-2.0
"""Comparing two optimizers bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from swap_testkit.torch import Difference, assert_same_bits, differences, same_bits

Pair = tuple[torch.optim.AdamW, torch.optim.AdamW]
Change = Callable[[torch.optim.AdamW], object]


# Tensors.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), -0.0, 0.0, float("inf")]),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.stride())}",
)
def test_a_tensor_has_the_bits_of_its_copy(tensor: torch.Tensor) -> None:
    other = tensor.detach().clone()
    assert other.stride() == tensor.stride()
    assert same_bits(tensor, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0]))),
        (  # two NaNs
            torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32),
            torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
        ),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(4), torch.zeros(8, dtype=torch.bfloat16)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(2, 0), torch.zeros(0, 1)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
    ],
    ids=["-0", "ulp", "nan payload", "dtype", "same bytes", "shape", "scalar", "empty", "strides"],
)
def test_other_bits_shape_type_or_strides_are_not_the_same(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    assert not same_bits(one, other)
    assert not same_bits(other, one)


# Optimizers.


def make_pair(**options: object) -> Pair:
    """Two optimizers of two groups that took one step with the same gradients."""
    shapes = [[(3,), (2, 2)], [(4,)]]
    pair = []
    for _ in range(2):
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(s)) for s in group]} for group in shapes
        ]
        optimizer = torch.optim.AdamW(groups, **options)
        for param in params_of(optimizer):
            param.grad = torch.linspace(-1, 1, param.numel()).view(param.shape)
        optimizer.step()
        pair.append(optimizer)
    return pair[0], pair[1]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def entry(optimizer: torch.optim.Optimizer, number: int = 1) -> dict[str, torch.Tensor]:
    """The states of the parameter that messages call "parameter 1 of group 0"."""
    return optimizer.state[params_of(optimizer)[number]]


def test_finds_nothing_between_equals() -> None:
    native, swapped = make_pair(amsgrad=True)
    assert list(differences(native, swapped)) == []
    assert_same_bits(native, swapped)


def test_finds_nothing_where_both_have_nan() -> None:
    native, swapped = make_pair()
    for optimizer in (native, swapped):
        entry(optimizer)["exp_avg"].fill_(float("nan"))
    assert_same_bits(native, swapped)


def one_ulp(tensor: torch.Tensor) -> None:
    last = tensor.detach().view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.tensor(float("inf"))))


CHANGES: dict[str, Change] = {
    "parameter 1 of group 0": lambda optimizer: one_ulp(params_of(optimizer)[1]),
    "parameter 0 of group 1": lambda optimizer: one_ulp(params_of(optimizer)[2]),
    "exp_avg of parameter 1 of group 0": lambda optimizer: one_ulp(entry(optimizer)["exp_avg"]),
    "exp_avg_sq of parameter 0 of group 1": lambda optimizer: one_ulp(
        entry(optimizer, 2)["exp_avg_sq"]
    ),
    "step of parameter 1 of group 0": lambda optimizer: entry(optimizer)["step"].add_(1),
    "lr of group 1": lambda optimizer: optimizer.param_groups[1].update(lr=0.5),
    "betas of group 0": lambda optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.99)),
    "amsgrad of group 0": lambda optimizer: optimizer.param_groups[0].update(amsgrad=0),
    "extra of group 0": lambda optimizer: optimizer.param_groups[0].update(extra=1),
    "maximize of group 0": lambda optimizer: optimizer.param_groups[0].pop("maximize"),
    "states of parameter 1 of group 0": lambda optimizer: entry(optimizer).pop("exp_avg_sq"),
    "states of parameter 0 of group 0": lambda optimizer: optimizer.state.pop(
        params_of(optimizer)[0]
    ),
}


@pytest.mark.parametrize("changed", [0, 1], ids=["native", "swapped"])
@pytest.mark.parametrize("what", CHANGES)
def test_names_what_differs(what: str, changed: int) -> None:
    pair = make_pair()
    CHANGES[what](pair[changed])
    assert [difference.what for difference in differences(*pair)] == [what]
    with pytest.raises(AssertionError, match=f"^{what}: native .*, swapped "):
        assert_same_bits(*pair)


def test_the_order_of_the_states_is_part_of_the_state() -> None:
    native, swapped = make_pair()
    states = entry(swapped)
    states["step"] = states.pop("step")
    (found,) = differences(native, swapped)
    assert found == Difference(
        "states of parameter 1 of group 0",
        "['step', 'exp_avg', 'exp_avg_sq']",
        "['exp_avg', 'exp_avg_sq', 'step']",
    )


def test_a_counter_of_another_kind_differs() -> None:
    native, swapped = make_pair()
    entry(swapped)["step"] = 1  # native has tensor(1.)
    (found,) = differences(native, swapped)
    assert (found.what, found.swapped) == ("step of parameter 1 of group 0", "1")


def test_a_learning_rate_in_a_tensor_is_compared_by_its_bits() -> None:
    native, swapped = make_pair(lr=torch.tensor(0.1), foreach=False)
    swapped.param_groups[0]["lr"] = native.param_groups[0]["lr"].clone()
    assert_same_bits(native, swapped)
    one_ulp(swapped.param_groups[0]["lr"].view(1))
    assert [found.what for found in differences(native, swapped)] == ["lr of group 0"]


@pytest.mark.parametrize("change", ["group", "parameter"])
def test_names_what_one_optimizer_has_more_of(change: str) -> None:
    native, swapped = make_pair()
    extra = torch.nn.Parameter(torch.ones(1))
    if change == "group":
        swapped.add_param_group({"params": [extra]})
    else:
        swapped.param_groups[1]["params"].append(extra)
    what = {"group": "number of groups", "parameter": "parameters of group 1"}[change]
    assert [found.what for found in differences(native, swapped)] == [what]


def test_tells_type_shape_and_first_values_of_both() -> None:
    native, swapped = make_pair()
    entry(native)["exp_avg"] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    entry(swapped)["exp_avg"] = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(native, swapped)
    assert str(caught.value) == (
        "exp_avg of parameter 1 of group 0: "
        "native torch.float32 (5,) strides (1,) with [1.0, 2.0, 3.0, 4.0] from element 0 on, "
        "swapped torch.float64 (1, 2) strides (2, 1) with [1.0, 2.0] from element 0 on"
    )


def test_tells_values_from_the_first_element_that_differs() -> None:
    native, swapped = make_pair()
    entry(native)["exp_avg"] = torch.arange(12.0)
    entry(swapped)["exp_avg"] = torch.arange(12.0)
    entry(swapped)["exp_avg"][9] += 1
    (found,) = differences(native, swapped)
    assert found.native.endswith("with [9.0, 10.0, 11.0] from element 9 on")
    assert found.swapped.endswith("with [10.0, 10.0, 11.0] from element 9 on")


def test_a_missing_option_is_not_the_option_none() -> None:
    native, swapped = make_pair()
    native.param_groups[0]["extra"] = None
    (found,) = differences(native, swapped)
    assert str(found) == "extra of group 0: native is there, swapped is missing"


@pytest.mark.parametrize(("count", "more"), [(10, ""), (13, "\n... and 3 more")])
def test_tells_the_first_ten(count: int, more: str) -> None:
    native = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1)) for _ in range(20)])
    swapped = copy.deepcopy(native)
    for param in params_of(swapped)[:count]:
        one_ulp(param)
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(native, swapped)
    lines = str(caught.value).split("\n")
    assert lines[9].startswith("parameter 9 of group 0: native torch.float32 (1,)")
    assert str(caught.value).endswith(lines[9] + more)
