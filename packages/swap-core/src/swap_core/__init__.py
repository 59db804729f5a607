# SPDX-License-Identifier: Apache-2.0
"""The framework-free core of optimizer-state swapping: config, plans, pipelines, reports.

Users install a binding (``swap-torch``) and import from there. This package has no dependency and
sees no tensor: it partitions, lays out, orders and counts; a binding gives it a device.
"""

from swap_core.__about__ import __version__
from swap_core.adapter import ADAPTER_GROUP, OptimizerSwapAdapter, find_adapter
from swap_core.batch import Batch
from swap_core.config import SwapOptimizerConfig, refuse_schedules
from swap_core.decorator import DeviceDecorator
from swap_core.device import SwapDevice
from swap_core.errors import (
    AlreadyWrappedError,
    StateDictError,
    StateLostError,
    SwapInternalError,
    UnknownStateKeyError,
    UnsupportedOptimizerError,
    UnsupportedOptionError,
)
from swap_core.forecast import Forecast, Hardware, Workload, forecast, recommended
from swap_core.host_memory import HostMemory, HostMemoryWarning, available_host_memory
from swap_core.layout import ALIGNMENT, HostRounding, Run, align, cover, place, runs_of
from swap_core.ledger import Ledger
from swap_core.model import VirtualDevice, VirtualEvent, VirtualMemory, VirtualStream
from swap_core.moves import restore_or_explain
from swap_core.packed import PackedPipeline
from swap_core.partition import partition, update_order
from swap_core.passage import Passage
from swap_core.per_tensor import PerTensorPipeline
from swap_core.pipeline import Pipeline
from swap_core.presets import PRESETS, Preset
from swap_core.report import StateReport, StayReason, SwapReport, format_bytes
from swap_core.slot import Residency, Span, SwapSlot
from swap_core.timeline import BatchTimes, StepTimes, step_times
from swap_core.trace import TraceLane, TraceSpan, read_trace, write_trace
from swap_core.tracing import Tracer, TracingDevice
from swap_core.unit import UpdateUnit

__all__ = [
    "ADAPTER_GROUP",
    "ALIGNMENT",
    "PRESETS",
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
