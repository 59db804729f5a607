# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from enum import IntEnum
from typing import Any

import pytest

from swap_core import SwapOptimizerConfig, refuse_schedules

DEFAULTS = {
    "swap_times": 16,
    "state_keys": None,
    "min_numel": 1024,
    "include_master_params": False,
    "packed_swap": None,
    "staging_buffers": 2,
    "allow_closure": False,
    "prefetch": "step",
    "zigzag": False,
    "overlap_backward": False,
    "device_budget": 0,
    "offload": "always",
}

SMALLEST = {"swap_times": 1, "min_numel": 0, "staging_buffers": 2}

BOOLEANS = ("include_master_params", "allow_closure", "zigzag")
CHOICES = {"prefetch": ("step", "backward"), "offload": ("always", "auto")}


class Two(IntEnum):
    TWO = 2


def config_with(field: str, value: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(**{field: value})


def refusal(field: str, value: object) -> str:
    """The message, after checking what every one of them must say."""
    with pytest.raises(ValueError, match=field) as caught:
        config_with(field, value)
    message = str(caught.value)
    assert message.startswith(f"SwapOptimizerConfig: {field}={value!r} is not accepted; give ")
    return message


def test_has_the_documented_fields_and_defaults() -> None:
    config = SwapOptimizerConfig()
    assert {field.name: getattr(config, field.name) for field in fields(config)} == DEFAULTS


@pytest.mark.parametrize("field", SMALLEST)
def test_accepts_the_smallest_integer_and_larger_ones(field: str) -> None:
    for value in (SMALLEST[field], SMALLEST[field] + 1, 10**12):
        assert getattr(config_with(field, value), field) == value


@pytest.mark.parametrize("field", SMALLEST)
@pytest.mark.parametrize("value", [True, False, 4.0, float("nan"), "4", None, Two.TWO, (4,)])
def test_refuses_what_is_not_an_integer(field: str, value: object) -> None:
    assert refusal(field, value).endswith(f"an integer >= {SMALLEST[field]}.")


@pytest.mark.parametrize("field", SMALLEST)
@pytest.mark.parametrize("below", [1, 2, 10**12])
def test_refuses_an_integer_that_is_too_small(field: str, below: int) -> None:
    smallest = SMALLEST[field]
    assert refusal(field, smallest - below).endswith(f"an integer >= {smallest}.")


@pytest.mark.parametrize("field", [*BOOLEANS, "packed_swap"])
@pytest.mark.parametrize("value", [True, False])
def test_accepts_booleans(field: str, value: bool) -> None:
    assert getattr(config_with(field, value), field) is value


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, 1.0, "True", None, ()])
def test_refuses_what_is_not_a_boolean(field: str, value: object) -> None:
    assert refusal(field, value).endswith("True or False.")


@pytest.mark.parametrize("value", [0, 1, 1.0, "None", ()])
def test_refuses_a_packed_swap_that_is_neither_boolean_nor_none(value: object) -> None:
    assert refusal("packed_swap", value).endswith("True or False or None.")


@pytest.mark.parametrize(
    "keys", [["exp_avg", "exp_avg_sq"], ("exp_avg", "exp_avg_sq"), ["master_param"]]
)
def test_makes_state_keys_a_tuple_in_the_order_given(keys: list[str] | tuple[str, ...]) -> None:
    assert config_with("state_keys", keys).state_keys == tuple(keys)


def test_does_not_see_later_changes_of_a_list_of_state_keys() -> None:
    keys = ["exp_avg"]
    config = config_with("state_keys", keys)
    keys.append("exp_avg_sq")
    assert config.state_keys == ("exp_avg",)


def test_reads_state_keys_that_can_be_read_only_once() -> None:
    config = config_with("state_keys", (key for key in ("exp_avg", "exp_avg_sq")))
    assert config.state_keys == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    "keys",
    [
        "exp_avg",
        "",
        b"exp_avg",
        (),
        [],
        ["exp_avg", "exp_avg"],
        ["exp_avg", 1],
        ["exp_avg", None],
        [["exp_avg"]],
        1,
        False,
    ],
    ids=repr,
)
def test_refuses_state_keys_that_are_not_distinct_names(keys: object) -> None:
    assert refusal("state_keys", keys).endswith(
        'a collection of distinct state names such as ("exp_avg", "exp_avg_sq"), or None.'
    )


@pytest.mark.parametrize("field", DEFAULTS)
def test_cannot_be_changed(field: str) -> None:
    config = SwapOptimizerConfig()
    with pytest.raises(FrozenInstanceError, match=field):
        setattr(config, field, DEFAULTS[field])


def test_takes_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        SwapOptimizerConfig(16)  # type: ignore[call-arg]


def test_checks_a_replaced_field_too() -> None:
    with pytest.raises(ValueError, match=r"swap_times=0 .* an integer >= 1"):
        replace(SwapOptimizerConfig(), swap_times=0)


def test_compares_hashes_and_pickles_by_value() -> None:
    config = SwapOptimizerConfig(swap_times=3, state_keys=("exp_avg",))
    same = replace(config_with("state_keys", ["exp_avg"]), swap_times=3)
    assert config == same
    assert hash(config) == hash(same)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config != replace(config, swap_times=4)


@pytest.mark.parametrize("field", CHOICES)
def test_accepts_its_choices_and_nothing_else(field: str) -> None:
    for value in CHOICES[field]:
        assert getattr(config_with(field, value), field) == value
    for value in ("", "Step", None, True, 0):
        assert refusal(field, value).endswith(" or ".join(map(repr, CHOICES[field])) + ".")


@pytest.mark.parametrize("value", [False, True, "trusted"])
def test_accepts_an_overlap_with_the_backward_pass(value: Any) -> None:
    assert config_with("overlap_backward", value).overlap_backward == value


@pytest.mark.parametrize("value", [1, None, "yes", "True"])
def test_refuses_other_overlaps(value: object) -> None:
    assert refusal("overlap_backward", value).endswith("True or False or 'trusted'.")


@pytest.mark.parametrize("value", [0, 1, 10**12, 0.0, 0.25, 1.0])
def test_accepts_a_device_budget_in_bytes_or_as_a_fraction(value: Any) -> None:
    assert config_with("device_budget", value).device_budget == value


@pytest.mark.parametrize("value", [-1, -0.1, 1.5, float("nan"), True, None, "1GiB"])
def test_refuses_other_device_budgets(value: object) -> None:
    assert refusal("device_budget", value).endswith("or a fraction (0.0 to 1.0).")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prefetch", {"prefetch": "backward", "overlap_backward": True}),
        ("zigzag", {"zigzag": True, "overlap_backward": "trusted"}),
        ("zigzag", {"zigzag": True, "packed_swap": False}),
        ("device_budget", {"device_budget": 0.5, "offload": "auto"}),
    ],
)
def test_refuses_fields_that_exclude_each_other(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"SwapOptimizerConfig: {field}=.* is not accepted"):
        SwapOptimizerConfig(**options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefetch", "backward"),
        ("zigzag", True),
        ("overlap_backward", "trusted"),
        ("device_budget", 0.5),
        ("offload", "auto"),
    ],
)
def test_bindings_without_schedules_refuse_them(field: str, value: object) -> None:
    refuse_schedules(SwapOptimizerConfig(swap_times=3, allow_closure=True), "nn.Adam")
    with pytest.raises(ValueError, match=rf"{field}={value!r} is for torch .* nn.Adam does not"):
        refuse_schedules(config_with(field, value), "nn.Adam")
