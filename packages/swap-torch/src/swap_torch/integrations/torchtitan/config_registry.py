# SPDX-License-Identifier: Apache-2.0
"""Any config function by its module and name, with the fields of swapping.

torchtitan looks for the function that ``--config`` names in ``config_registry`` of the package that
``--module`` names. Here the name is ``<module>.<function>``, where the module is what ``--module``
would be otherwise::

    --module swap_torch.integrations.torchtitan --config llama3.llama3_8b --optimizer.swap-optimizer
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable

from swap_torch.integrations.torchtitan.config import swap_config

__all__: list[str] = []

ConfigFunction = Callable[[], Configurable.Config]


def __getattr__(name: str) -> ConfigFunction:
    """Find a config function; what torchtitan asks for is never defined here."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, function = name.rpartition(".")
    # ValueErrors from here on. torchtitan asks with a default, which an AttributeError would give,
    # and then lists the functions of this module, which has none.
    if not module:
        raise ValueError(
            f"--config {name}: with --module {__package__} give --config <module>.<function>, such "
            f"as --config llama3.{name}."
        )
    original = _function(_import(module), function)

    def config() -> Configurable.Config:
        return _with_swap_fields(original(), name)

    return config


def _import(module: str) -> ModuleType:
    """Import what torchtitan would, in its order: of its models, of its experiments, any other."""
    candidates = (
        f"torchtitan.models.{module}.config_registry",
        f"torchtitan.experiments.{module}.config_registry",
        f"{module}.config_registry",
        module,
    )
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            # Not one that is missing inside of what was found.
            if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                raise
    raise ValueError(
        f"--config: {module!r} is neither a model of torchtitan nor a module that can be imported; "
        f"looked for {', '.join(candidates)}."
    )


def _function(module: ModuleType, name: str) -> ConfigFunction:
    found = getattr(module, name, None)
    if not callable(found):
        names = [each for each, value in vars(module).items() if _is_config(value, module)]
        raise ValueError(
            f"--config: {module.__name__} has no config function {name!r}; it has "
            f"{', '.join(names) or 'none'}."
        )
    function: ConfigFunction = found
    return function


def _is_config(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _with_swap_fields(config: Configurable.Config, name: str) -> Configurable.Config:
    """Replace every optimizer config in ``config``, which may be that of several trainers."""
    found = list(config.traverse(OptimizersContainer.Config))
    if not found:
        raise ValueError(
            f"--config {name}: {type(config).__qualname__} has no optimizer config to swap with."
        )
    for _, optimizer, parent, attribute in found:
        if isinstance(parent, list):
            parent[attribute] = swap_config(optimizer)
        else:
            setattr(parent, attribute, swap_config(optimizer))
    return config
