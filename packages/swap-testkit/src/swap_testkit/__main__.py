# SPDX-License-Identifier: Apache-2.0
"""``python -m swap_testkit``."""

from swap_testkit.cli import main

raise SystemExit(main())
