# SPDX-License-Identifier: Apache-2.0
"""What moved between the versions of MindSpore that are supported."""

from __future__ import annotations

try:
    from mindspore.graph._utils.check_jit_forbidden_api import jit_forbidden_register
    from mindspore.graph.api import _pynative_executor as executor
except ImportError:  # before 2.9
    from mindspore._check_jit_forbidden_api import jit_forbidden_register
    from mindspore.common.api import _pynative_executor as executor

__all__ = ["executor", "jit_forbidden_register"]
