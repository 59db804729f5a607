# SPDX-License-Identifier: Apache-2.0
"""One rank, started by msrun: ``worker.py FOLDER``. See :mod:`swap_testkit.mindspore.launch`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

__all__ = ["main"]


def main(folder: Path) -> None:
    """Do the work that lies in ``folder``, and put the outcomes there."""
    import mindspore as ms

    from swap_testkit.mindspore.align import outcomes_on_rank
    from swap_testkit.mindspore.world import join

    ms.set_context(mode=ms.PYNATIVE_MODE)
    if ms.get_context("device_target") == "CPU":
        ms.set_context(runtime_num_threads=1)
    world = join()
    work = pickle.loads((folder / "work").read_bytes())
    outcomes = outcomes_on_rank(work, world)
    (folder / f"rank{world.rank}").write_bytes(pickle.dumps(outcomes))


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules would hide others of the same name
    main(Path(sys.argv[1]))
