# SPDX-License-Identifier: Apache-2.0
"""What swapping relies on in MindFormers' AdamW, checked once when an optimizer is wrapped.

MindFormers is matched by names and never imported: the class, and the module that defines it, are
those of the optimizer that the user made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import ModuleType
from typing import Any

from mindspore import nn

from swap_core import UnsupportedOptimizerError

__all__ = ["KNOWN_VERSIONS", "NAME", "module_of", "native_class", "verify"]

KNOWN_VERSIONS = ("2.0.0", "2.1.0")
"""The releases of MindFormers with which this package is tested."""

_MODULE = "mindformers.pynative.optimizer.adamw"
NAME = f"{_MODULE}.AdamW"

_PER_PARAMETER = (
    *("_parameters", "fp32_params", "_is_low_precision_param", "exp_avg", "exp_avg_sq"),
    "optim_filter",
)
_ATTRIBUTES = (
    *("max_exp_avg_sq", "fused_adamw_opt", "enable_fused_opt", "enable_cpu_offload"),
    *("amsgrad", "maximize", "beta1", "beta2", "eps", "beta1_value", "beta2_value", "eps_value"),
    *("one_minus_beta2", "global_step", "is_group", "is_group_lr"),
    *("get_lr", "get_weight_decay", "_increase_global_step", "reload_main_params_from_model"),
)
_UPDATE = (
    *("beta1", "beta2", "eps", "lr", "weight_decay", "parameters", "gradients", "exp_avg"),
    *("exp_avg_sq", "optim_filter", "bias_correction1", "bias_correction2", "one_minus_beta2"),
)
_FUSED_UPDATE = (
    *("op_adamw", "amsgrad", "maximize", "beta1", "beta2", "eps", "step", "lr", "weight_decay"),
    *("parameters", "gradients", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
)
_FUNCTIONS = {
    "_run_adamw_opt": _UPDATE,
    "_run_fused_adamw_opt": _FUSED_UPDATE,
    "inplace_copy": ("dst", "src"),
}
_OBJECTS = ("op_cast", "SkipDTensorDispatch")


def native_class(optimizer: object) -> type | None:
    """MindFormers' class among those of ``optimizer``, if its update is the one that runs."""
    kind = type(optimizer)
    for base in kind.__mro__:
        if (base.__module__, base.__qualname__) == (_MODULE, "AdamW"):
            return base if kind.construct is base.construct else None  # type: ignore[attr-defined]
    return None


def module_of(optimizer: nn.Optimizer) -> ModuleType:
    """The module that defines the class of ``optimizer``, with the functions of its update."""
    kind = native_class(optimizer)
    assert kind is not None  # the adapter matches
    return sys.modules[kind.__module__]


def verify(optimizer: nn.Optimizer, module: ModuleType) -> None:
    """Refuse an AdamW that is built in another way.

    Raises:
        UnsupportedOptimizerError: with all that is missing, and the versions that are known.
    """
    problems = [*_missing_attributes(optimizer), *_changed_functions(module)]
    if problems:
        raise UnsupportedOptimizerError(
            f"swap_optimizer: this {NAME} (MindFormers {_installed()}) is not built as the ones "
            f"that swap-mindformers knows: {'; '.join(problems)}. Known to work: MindFormers "
            f"{' and '.join(KNOWN_VERSIONS)}. Install one of these, or a newer swap-mindformers."
        )


def _missing_attributes(optimizer: nn.Optimizer) -> Iterator[str]:
    for name in (*_PER_PARAMETER, *_ATTRIBUTES):
        if _find(optimizer, name) is _MISSING:
            yield f"the optimizer has no {name!r}"
    count = len(optimizer.parameters)
    for name in _PER_PARAMETER:
        value = _find(optimizer, name)
        if value is not _MISSING and len(value) != count:
            yield f"{name!r} has {len(value)} entries for {count} parameters"


def _changed_functions(module: ModuleType) -> Iterator[str]:
    for name in (*_FUNCTIONS, *_OBJECTS):
        if _find(module, name) is _MISSING:
            yield f"its module has no {name!r}"
    for name, expected in _FUNCTIONS.items():
        function = _find(module, name)
        if function is not _MISSING:
            found = tuple(signature(function).parameters)
            if found != expected:
                yield f"{name!r} takes ({', '.join(found)}) and not ({', '.join(expected)})"


_MISSING = object()


def _find(owner: object, name: str) -> Any:  # noqa: ANN401  # whatever there is
    return getattr(owner, name, _MISSING)


def _installed() -> str:
    try:
        return version("mindformers")
    except PackageNotFoundError:
        return "of unknown version"
