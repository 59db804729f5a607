# SPDX-License-Identifier: Apache-2.0
"""The public names. A change here is a change for users, and belongs in CHANGELOG.md."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import swap_core

NAMES = [
    "ADAPTER_GROUP",
    "ALIGNMENT",
    "AlreadyWrappedError",
    "Batch",
    "BatchTimes",
    "DeviceDecorator",
    "Forecast",
    "Hardware",
    "HostMemory",
    "HostMemoryWarning",
    "HostRounding",
    "Ledger",
    "OptimizerSwapAdapter",
    "PRESETS",
    "PackedPipeline",
    "Passage",
    "PerTensorPipeline",
    "Pipeline",
    "Preset",
    "Residency",
    "Run",
    "Span",
    "StateDictError",
    "StateLostError",
    "StateReport",
    "StayReason",
    "StepTimes",
    "SwapDevice",
    "SwapInternalError",
    "SwapOptimizerConfig",
    "SwapReport",
    "SwapSlot",
    "TraceLane",
    "TraceSpan",
    "Tracer",
    "TracingDevice",
    "UnknownStateKeyError",
    "UnsupportedOptimizerError",
    "UnsupportedOptionError",
    "UpdateUnit",
    "VirtualDevice",
    "VirtualEvent",
    "VirtualMemory",
    "VirtualStream",
    "Workload",
    "__version__",
    "align",
    "available_host_memory",
    "cover",
    "find_adapter",
    "forecast",
    "format_bytes",
    "partition",
    "place",
    "read_trace",
    "recommended",
    "refuse_schedules",
    "restore_or_explain",
    "runs_of",
    "step_times",
    "update_order",
    "write_trace",
]

MODULES = [module.name for module in pkgutil.iter_modules(swap_core.__path__)]
OBJECTS = {
    name: thing
    for name in swap_core.__all__
    if inspect.isclass(thing := getattr(swap_core, name, None)) or inspect.isroutine(thing)
}
CLASSES = {name: thing for name, thing in OBJECTS.items() if inspect.isclass(thing)}


def public_members(kind: type) -> dict[str, object]:
    """The functions and properties that a class defines itself."""
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, (property, classmethod, staticmethod)))
    }


def test_offers_exactly_these_names() -> None:
    assert sorted(swap_core.__all__) == NAMES


def test_offers_only_names_that_exist() -> None:
    assert [name for name in swap_core.__all__ if not hasattr(swap_core, name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_has_modules_that_say_what_they_offer(module: str) -> None:
    loaded = importlib.import_module(f"swap_core.{module}")
    assert loaded.__doc__
    if not module.startswith("__"):
        assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("name", OBJECTS)
def test_documents_every_class_and_function(name: str) -> None:
    doc = vars(OBJECTS[name]).get("__doc__") if name in CLASSES else OBJECTS[name].__doc__
    assert doc
    # Not what a dataclass writes where nobody wrote anything.
    assert not doc.startswith(f"{name}(")


@pytest.mark.parametrize("name", CLASSES)
def test_documents_every_member_of_every_class(name: str) -> None:
    kind = CLASSES[name]
    members = public_members(kind)
    assert [member for member in members if not getattr(kind, member).__doc__] == []
