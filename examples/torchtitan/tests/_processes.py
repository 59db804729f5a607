# SPDX-License-Identifier: Apache-2.0
"""Run torchtitan's trainer in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

LAUNCHER = Path(__file__).with_name("launch.py")
_GRACE_SECONDS = 5.0
"""How long other ranks may go on after one failed: most then wait for it in a collective."""


class TrainingFailedError(RuntimeError):
    """A rank failed or took too long. The message is its last words."""


def train(
    trainings: Sequence[Sequence[str]],
    *,
    device: str,
    nproc: int,
    assets: Path,
    logs: Path,
    silence: float = 180.0,
) -> str:
    """Run trainings one after the other in ``nproc`` processes.

    Args:
        trainings: The command line arguments of each.
        device: ``cpu``, ``sim``, or the type of an accelerator that is there.
        nproc: Number of processes.
        assets: What ``_assets.make_assets`` made.
        logs: A folder that does not exist yet, for what each rank prints.
        silence: After as many seconds in which no rank prints anything all are killed.

    Returns:
        What rank 0 printed.

    Raises:
        TrainingFailedError: a rank failed, or all were silent for too long.
    """
    arguments = [argument for training in trainings for argument in ("---", *training)][1:]
    (logs / "meeting").mkdir(parents=True)
    files = [logs / f"rank{rank}.log" for rank in range(nproc)]
    with ExitStack() as stack:
        ranks = []
        for rank, file in enumerate(files):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(LAUNCHER), device, *arguments],
                    env={**os.environ, **_environment(rank, nproc, assets, logs)},
                    stdout=stack.enter_context(file.open("w")),
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        failed = _wait(ranks, files, silence)
    if failed is not None:
        raise TrainingFailedError(_last_words(files[failed], ranks[failed].returncode))
    return files[0].read_text()


def _environment(rank: int, nproc: int, assets: Path, logs: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "TITAN_TEST_MEETING": str(logs / "meeting"),
        "TITAN_TEST_ASSETS": str(assets),
        "HF_DATASETS_CACHE": str(assets / f"cache{rank}"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: list[subprocess.Popen[bytes]], files: list[Path], silence: float) -> int | None:
    """Wait for all; return the first that failed, or one that hangs, if any."""
    failed = None
    printed, deadline = 0, time.monotonic() + silence
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or time.monotonic() > deadline:
            break
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            deadline = time.monotonic() + _GRACE_SECONDS
        now = sum(file.stat().st_size for file in files)
        if failed is None and now != printed:
            printed, deadline = now, time.monotonic() + silence
        time.sleep(0.1)
    if failed is None:
        failed = next((rank for rank, code in enumerate(codes) if code != 0), None)
    return failed


def _last_words(file: Path, code: int | None) -> str:
    text = file.read_text()
    if code == -9:
        return f"{file.name}: printed nothing for too long and was killed\n{text[-2000:]}"
    errors = [line for line in text.splitlines() if _is_error(line)]
    return "\n".join([*errors[-3:], f"exit code {code} of {file.name}", text[-3000:]])


def _is_error(line: str) -> bool:
    words = line.replace("[rank0]:", "").replace("[rank1]:", "").split(":", 1)[0].split()
    return len(words) == 1 and words[0].endswith(("Error", "Exception"))
