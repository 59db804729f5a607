# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

import swap_core
from swap_core import errors

KINDS = {
    "AlreadyWrappedError": ValueError,
    "StateDictError": ValueError,
    "StateLostError": RuntimeError,
    "SwapInternalError": RuntimeError,
    "UnknownStateKeyError": ValueError,
    "UnsupportedOptimizerError": ValueError,
    "UnsupportedOptionError": ValueError,
}


def test_lists_every_class_here() -> None:
    assert sorted(errors.__all__) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_is_the_built_in_error_that_callers_already_catch(name: str) -> None:
    kind = getattr(swap_core, name)
    assert kind.__bases__ == (KINDS[name],)
    with pytest.raises(KINDS[name], match="swap_times=0"):
        raise kind("swap_times=0")


def test_asks_for_a_report_of_a_broken_invariant() -> None:
    message = str(swap_core.SwapInternalError("batch 3 is DEVICE, expected HOST"))
    assert message.startswith("batch 3 is DEVICE, expected HOST. This is a bug in swap-core")
    assert "please report it" in message
