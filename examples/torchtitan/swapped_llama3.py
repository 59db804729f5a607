# SPDX-License-Identifier: Apache-2.0
"""A torchtitan config whose optimizer can swap: torchtitan's own, and one call.

torchrun --nproc-per-node 8 -m torchtitan.train --module swapped_llama3 --config debugmodel
"""

from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel

from swap_torch.integrations.torchtitan import swap_config


def debugmodel():
    config = llama3_debugmodel()
    config.optimizer = swap_config(config.optimizer, swap_optimizer=True)
    return config


def eight_billion():
    """Off unless the command line says --optimizer.swap-optimizer."""
    config = llama3_8b()
    config.optimizer = swap_config(config.optimizer, swap_optimizer_times=32)
    return config
