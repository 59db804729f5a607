# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    # What it imports warns of enums in torch's trees, and warnings are errors in tests.
    warnings.simplefilter("ignore")
    import torchao.optim  # noqa: F401
