# SPDX-License-Identifier: Apache-2.0
"""Imports, and nothing else, for the process from which ranks are forked (see ``launch``).

Whatever is not imported here is imported by each rank anew: the first step of any optimizer imports
``torch._dynamo``, which takes seconds.
"""

import torch.distributed.tensor.parallel  # noqa: F401

import swap_torch  # noqa: F401
