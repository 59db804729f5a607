# SPDX-License-Identifier: Apache-2.0
"""torchtitan: ``swap_optimizer`` as a field of the optimizer config and as a command line flag.

Three ways to the flags; nothing of torchtitan is patched, and importing this changes nothing:

- one call in a config function of yours: ``config.optimizer = swap_config(config.optimizer)``
- without code: ``--module swap_torch.integrations.torchtitan --config llama3.llama3_8b``
- for any config as it is, with options instead of flags:
  ``--override.imports 'swap_torch.integrations.torchtitan.swap_optimizer={"times": 16}'``

See docs/torchtitan.md.
"""

from __future__ import annotations

try:
    from torchtitan.config.override import override
except ImportError as error:
    raise ImportError(
        "swap_torch.integrations.torchtitan needs torchtitan 0.3, whose configs are Python and can "
        "be overridden; it is not installed, or older. "
        "pip install 'torchtitan>=0.3,<0.4' 'torch>=2.14'"
    ) from error

from torchtitan.components.optimizer import OptimizersContainer

from swap_torch.integrations.torchtitan.config import option_names, swap_config
from swap_torch.integrations.torchtitan.container import SwapOptimizersContainer, swap_container

__all__ = ["SwapOptimizersContainer", "swap_config", "swap_container", "swap_optimizer"]


# Here, and not in a module of its own: torchtitan finds it by the module that defines it.
@override(target=OptimizersContainer.Config, description="optimizer states in host memory")
def swap_optimizer(
    config: OptimizersContainer.Config, **options: object
) -> OptimizersContainer.Config:
    """Switch swapping on: what ``--override.imports`` calls.

    Args:
        config: The optimizer config that torchtitan found.
        options: Fields without their prefix: ``times`` for ``swap_optimizer_times`` and so on.

    Raises:
        ValueError: an option that does not exist or has a value that is not accepted, or a config
            that cannot be combined with swapping.
    """
    return swap_config(config, swap_optimizer=True, **option_names(options))
