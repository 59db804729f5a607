# SPDX-License-Identifier: Apache-2.0
"""What users may rely on. A change here is a change of the interface; tell it in the changelog."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import swap_mindspore

PUBLIC = [
    "Arena",
    "AscendDevice",
    "DeviceMemory",
    "HostDevice",
    "MindSporeSwapAdapter",
    "MindSporeSwapDevice",
    "MindSporeSwapOptimizer",
    "Piece",
    "Residency",
    "Segment",
    "SwapOptimizerConfig",
    "SwapReport",
    "SwapSlot",
    "Transfer",
    "UpdateUnit",
    "__version__",
    "ascend_device",
    "is_swap_optimizer",
    "swap_optimizer",
]

OBJECTS = {
    name: inspect.unwrap(getattr(swap_mindspore, name)) for name in PUBLIC if name != "__version__"
}


def _functions(name: str, obj: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """``obj`` itself, or the public functions that its class defines."""
    if inspect.isfunction(obj):
        yield name, obj
    if not inspect.isclass(obj):
        return
    for attribute, value in vars(obj).items():
        if attribute.startswith("_"):
            continue
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        value = value.fget if isinstance(value, property) else value
        if inspect.isfunction(value) and value.__module__.startswith("swap_"):
            yield f"{name}.{attribute}", value


FUNCTIONS = [pair for name, obj in OBJECTS.items() for pair in _functions(name, obj)]


def test_the_public_names_are_these() -> None:
    assert list(swap_mindspore.__all__) == PUBLIC


def test_nothing_else_without_an_underscore_is_importable_but_modules() -> None:
    others = {
        name
        for name, value in vars(swap_mindspore).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert others <= set(PUBLIC)


@pytest.mark.parametrize("name", OBJECTS)
def test_public_objects_say_what_they_are(name: str) -> None:
    obj = OBJECTS[name]
    # The object's own text: a class inherits that of its base, a dataclass gets its signature.
    text = obj.__doc__ if inspect.isfunction(obj) else vars(obj).get("__doc__")
    assert len((text or "").split()) >= 4
    assert not (text or "").startswith(f"{name}(")


@pytest.mark.parametrize(
    ("name", "function"), FUNCTIONS, ids=[name.replace(".", "-") for name, _ in FUNCTIONS]
)
def test_public_functions_are_documented_and_annotated(
    name: str, function: Callable[..., Any]
) -> None:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if "." in name and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    missing = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    assert not missing
    assert signature.return_annotation is not inspect.Signature.empty
    assert (function.__doc__ or "").strip()


def test_the_two_functions_take_what_the_interface_says() -> None:
    wrap = inspect.signature(swap_mindspore.swap_optimizer).parameters
    assert list(wrap) == ["optimizer", "config", "device"]
    assert wrap["optimizer"].default is inspect.Parameter.empty
    assert wrap["config"].default is None
    assert (wrap["device"].kind, wrap["device"].default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert list(inspect.signature(swap_mindspore.is_swap_optimizer).parameters) == ["obj"]


def test_the_fields_of_the_config_and_their_defaults_are_these() -> None:
    parameters = inspect.signature(swap_mindspore.SwapOptimizerConfig).parameters
    assert {name: p.default for name, p in parameters.items()} == {
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
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
