# SPDX-License-Identifier: Apache-2.0
"""``python -m swap_core``."""

import sys

from swap_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
