# SPDX-License-Identifier: Apache-2.0
"""What users may rely on. A change here is a change of the interface; tell it in the changelog."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import swap_testkit
import swap_testkit.torch
import swap_testkit.torch.simulator

PUBLIC = {
    swap_testkit: [
        "Alignment",
        "Array",
        "Memory",
        "Mismatch",
        "Op",
        "RecordingDevice",
        "Region",
        "Regions",
        "RunRecord",
        "Tamper",
        "Tolerance",
        "Unordered",
        "__version__",
        "align",
        "assert_aligned",
        "check_order",
    ],
    swap_testkit.torch: [
        "CopySchedule",
        "CpuAsDevice",
        "Difference",
        "Job",
        "RankFailedError",
        "TorchRecordingDevice",
        "Trainer",
        "assert_same_bits",
        "differences",
        "host_region_of",
        "launch",
        "record_updates",
        "regions_of",
        "same_bits",
    ],
    swap_testkit.torch.simulator: [
        "NPU_QUIRKS",
        "BuildError",
        "Link",
        "Quirks",
        "Race",
        "Schedule",
        "enable",
        "enabled_name",
        "fallbacks",
        "host_read",
        "host_write",
        "mark_private_format",
        "pinned_bytes",
        "pinned_peak_bytes",
        "queued_operations",
        "race_count",
        "races",
        "raise_on_race",
        "reset",
        "scheduled",
        "set_memory_limit",
        "set_pinned_limit",
        "set_quirks",
        "set_schedule",
        "strict_free",
    ],
}

OBJECTS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in PUBLIC.items()
    for name in names
    if name not in ("__version__", "NPU_QUIRKS")
}


def _functions(name: str, obj: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """``obj`` itself, or the public functions that its class and the bases of it define."""
    if inspect.isfunction(obj):
        yield name, obj
    if not inspect.isclass(obj):
        return
    for attribute in dir(obj):
        value = inspect.getattr_static(obj, attribute)
        value = value.fget if isinstance(value, property) else value
        if (
            not attribute.startswith("_")
            and inspect.isfunction(value)
            and value.__module__.startswith("swap_testkit")
        ):
            yield f"{name}.{attribute}", value


FUNCTIONS = [pair for name, obj in OBJECTS.items() for pair in _functions(name, obj)]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_the_public_names_are_these(module: ModuleType) -> None:
    assert list(module.__all__) == PUBLIC[module]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_nothing_else_without_an_underscore_is_importable_but_modules(module: ModuleType) -> None:
    others = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert others <= set(PUBLIC[module])
    assert module.__doc__


@pytest.mark.parametrize("name", OBJECTS)
def test_public_objects_say_what_they_are(name: str) -> None:
    obj = OBJECTS[name]
    # The object's own text: a class inherits that of its base, a dataclass gets its signature.
    text = obj.__doc__ if inspect.isfunction(obj) else vars(obj).get("__doc__")
    assert len((text or "").split()) >= 4
    assert not (text or "").startswith(f"{obj.__name__}(")


@pytest.mark.parametrize(
    ("name", "function"), FUNCTIONS, ids=[name.replace(".", "-") for name, _ in FUNCTIONS]
)
def test_public_functions_are_documented_and_annotated(
    name: str, function: Callable[..., Any]
) -> None:
    signature = inspect.signature(function)
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.name != "self" and parameter.annotation is inspect.Parameter.empty
    ]
    assert not missing
    assert signature.return_annotation is not inspect.Signature.empty
    assert (function.__doc__ or "").strip()


def test_the_core_of_the_kit_loads_no_framework() -> None:
    check = "import sys, swap_testkit; sys.exit(bool({'torch', 'mindspore'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_options_of_the_device_and_their_defaults_are_these() -> None:
    parameters = inspect.signature(swap_testkit.torch.CpuAsDevice).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "schedule": swap_testkit.torch.CopySchedule.EARLIEST,
        "seed": 0,
        "poison": False,
        "limit": None,
    }
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    assert [schedule.name for schedule in swap_testkit.torch.CopySchedule] == [
        "EARLIEST",
        "LATEST",
        "RANDOM",
    ]


def test_the_fields_of_the_records_are_these() -> None:
    fields = {
        kind.__name__: list(inspect.signature(kind).parameters)
        for kind in (
            swap_testkit.Region,
            swap_testkit.Op,
            swap_testkit.Tamper,
            swap_testkit.Unordered,
            swap_testkit.torch.Difference,
        )
    }
    assert fields == {
        "Region": ["buffer", "start", "end"],
        "Op": ["verb", "stream", "event", "reads", "writes"],
        "Tamper": ["verb", "nth", "error", "times"],
        "Unordered": ["earlier", "later", "region", "nbytes"],
        "Difference": ["what", "native", "swapped"],
    }
