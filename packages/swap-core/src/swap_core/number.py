# SPDX-License-Identifier: Apache-2.0
"""Numbers of the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

__all__ = ["Number"]


@dataclass(frozen=True, slots=True)
class Number:
    """What a flag takes; the ``type`` of an argument.

    Args:
        least: The smallest that is accepted.
        most: The largest. There is always one: neither infinity nor a slip of many zeros passes.
        whole: Whether it must be an integer; ``7e9`` is one.
    """

    least: float
    most: float
    whole: bool = True

    def __call__(self, text: str) -> float:
        """Read a number; an ``int`` if it must be whole.

        Raises:
            argparse.ArgumentTypeError: what was found and what is accepted.
        """
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # What is not a number is not between any two.
        if not self.least <= value <= self.most or (self.whole and not value.is_integer()):
            kind = "whole number" if self.whole else "number"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not accepted; give a {kind} from {self.least:g} to {self.most:g}"
            )
        return int(value) if self.whole else value
