# SPDX-License-Identifier: Apache-2.0
"""Errors, one class per kind of mistake.

Every message names the subject, what was found, what is accepted and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "AlreadyWrappedError",
    "StateDictError",
    "StateLostError",
    "SwapInternalError",
    "UnknownStateKeyError",
    "UnsupportedOptimizerError",
    "UnsupportedOptionError",
]


class UnsupportedOptimizerError(ValueError):
    """The object given to ``swap_optimizer`` is not an optimizer that can be swapped."""


class UnsupportedOptionError(ValueError):
    """The optimizer or the config has an option that cannot be combined with swapping."""


class UnknownStateKeyError(ValueError):
    """``state_keys`` names a state that the optimizer does not have."""


class AlreadyWrappedError(ValueError):
    """The optimizer swaps already; wrapping it twice would swap nothing more."""


class StateDictError(ValueError):
    """A state dict does not fit the optimizer that it is loaded into. Nothing was changed."""


class StateLostError(RuntimeError):
    """A batch could not be stored, not even on the second attempt.

    Its states on the host are older than its parameters. Training must go on from a checkpoint.
    """


class SwapInternalError(RuntimeError):
    """An invariant of this library is broken: a bug here, never the caller's mistake."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}. This is a bug in swap-core or in a binding; please report it with this "
            f"traceback."
        )
