# SPDX-License-Identifier: Apache-2.0
"""Imports, and nothing else, for the process from which ranks are forked (see ``launch``)."""

import swap_torch  # noqa: F401
