# SPDX-License-Identifier: Apache-2.0
"""Bindings to trainers, one package each. Nothing else of swap_torch imports them."""
