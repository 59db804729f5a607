# SPDX-License-Identifier: Apache-2.0
"""Name a function so that another process finds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

__all__ = ["FunctionReference"]


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function of a module, by name; picklable.

    Pickle names a function by its module, which another process may not be able to import: pytest's
    importlib mode and scripts give modules names of their own. So the file is remembered too.
    """

    module: str
    name: str
    file: str | None

    @classmethod
    def to(cls, function: Callable[..., object]) -> FunctionReference:
        """Refer to ``function``.

        Raises:
            ValueError: it is a lambda or defined inside another function.
        """
        name = function.__qualname__
        if "<" in name or "." in name:
            raise ValueError(
                f"{function!r} cannot be found from another process: it is a lambda, a method or "
                f"defined inside a function. Give a function at the top level of a module."
            )
        module = sys.modules[function.__module__]
        return cls(function.__module__, name, vars(module).get("__file__"))

    @classmethod
    def named(cls, text: str) -> FunctionReference:
        """Refer to ``package.module:function``.

        Raises:
            ValueError: the text has another form.
        """
        module, colon, name = text.partition(":")
        if not colon or not name.isidentifier():
            raise ValueError(f"{text!r} does not name a function; give 'package.module:function'.")
        return cls(module, name, None)

    def find(self) -> Callable[..., object]:
        """The function, in this process.

        Raises:
            ValueError: the module has no such function.
        """
        found = vars(self._find_module()).get(self.name)
        if not callable(found):
            raise ValueError(f"module {self.module} has no function {self.name}.")
        result: Callable[..., object] = found
        return result

    def _find_module(self) -> ModuleType:
        if self.file is None or (self.module in sys.modules and self.module != "__main__"):
            return import_module(self.module)
        try:
            module = import_module(self.module)
        except ImportError:
            return self._load_file(self.file)
        return module if vars(module).get("__file__") == self.file else self._load_file(self.file)

    def _load_file(self, file: str) -> ModuleType:
        spec = spec_from_file_location(f"_swap_testkit_{self.name}", file)
        if spec is None or spec.loader is None:
            raise ValueError(f"{file} is not a Python file, so {self.name} cannot be found in it.")
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
