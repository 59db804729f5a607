# SPDX-License-Identifier: Apache-2.0
"""What every adapter must hold to, as tests that any project can run for its own.

::

    SUBJECT = Subject(lambda params: Lion(params, lr=0.01), adapter=LionAdapter)


    @pytest.mark.parametrize("law", LAWS)
    def test_the_adapter_holds_to(law):
        check_law(law, SUBJECT)

CPU tensors play the device's part, so no accelerator is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from swap_testkit.torch.laws.bits import (
    each_key_alone,
    gradients_that_come_and_go,
    groups,
    hooks,
    same_bits_whatever_the_batches,
)
from swap_testkit.torch.laws.failures import failures
from swap_testkit.torch.laws.memory import memory, order, steady_state
from swap_testkit.torch.laws.saving import copies, phases, state_dicts
from swap_testkit.torch.laws.subject import LawBrokenError, Subject

__all__ = ["LAWS", "LawBrokenError", "Subject", "check_law"]

LAWS: Mapping[str, Callable[[Subject], None]] = MappingProxyType(
    {
        "bits": same_bits_whatever_the_batches,
        "gradients": gradients_that_come_and_go,
        "groups": groups,
        "hooks": hooks,
        "keys": each_key_alone,
        "memory": memory,
        "order": order,
        "steady state": steady_state,
        "state dicts": state_dicts,
        "copies": copies,
        "phases": phases,
        "failures": failures,
    }
)
"""Each law by name; the functions' own texts say what they demand."""


def check_law(name: str, subject: Subject) -> None:
    """Raise :class:`LawBrokenError` unless ``subject`` holds to the law ``name``.

    Args:
        name: One of :data:`LAWS`.
        subject: The optimizer and its adapter.

    Raises:
        ValueError: there is no such law.
        LawBrokenError: with the law, what it demands, and what was found.
    """
    law = LAWS.get(name)
    if law is None:
        raise ValueError(f"law {name!r} is unknown; there are: {', '.join(LAWS)}.")
    demands = (law.__doc__ or "").strip().partition("\n")[0]
    try:
        law(subject)
    except AssertionError as error:
        raise LawBrokenError(f"law {name!r} ({demands}) is broken: {error}") from error
    except Exception as error:
        raise LawBrokenError(f"law {name!r} ({demands}) is broken: {error!r}") from error
