# SPDX-License-Identifier: Apache-2.0
"""Run scenarios on several processes of this machine, under msrun.

A launch takes about 20 seconds before anything is computed, so one launch runs many scenarios.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swap_core import SwapOptimizerConfig
from swap_testkit.outcome import RankOutcome

__all__ = ["FOLDER_VARIABLE", "JOINED", "RankFailedError", "Work", "launch", "run_under_msrun"]

_WORKER = Path(__file__).with_name("worker.py")
_LOG_CHARACTERS = 3000
FOLDER_VARIABLE = "SWAP_TESTKIT_FOLDER"
"""The environment variable by which ranks know the folder of their launch."""
JOINED = "joined"
"""Begins the name of the file that a rank leaves there when it has met the others."""

_log = logging.getLogger(__name__)


class RankFailedError(RuntimeError):
    """A rank raised, died or took too long. The message has the end of every rank's log."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each rank does. Picklable."""

    scenarios: tuple[str, ...]
    optimizers: tuple[str, ...]
    config: SwapOptimizerConfig
    steps: int


def launch(work: Work, *, nproc: int, timeout: float = 600.0) -> list[list[RankOutcome]]:
    """Run ``work`` on ``nproc`` ranks.

    Args:
        work: Scenarios by name, and with what.
        nproc: Number of ranks.
        timeout: Seconds after which all ranks are killed: one that fails can leave others waiting.

    Returns:
        By rank the outcomes, in the order in which :func:`swap_testkit.mindspore.align.variants`
        lists them.

    Raises:
        RankFailedError: a rank failed or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="swap-testkit-") as name:
        folder = Path(name)
        (folder / "work").write_bytes(pickle.dumps(work))
        run_under_msrun(_WORKER, str(folder), folder=folder, nproc=nproc, timeout=timeout)
        silent = [rank for rank in range(nproc) if not (folder / f"rank{rank}").exists()]
        if silent:
            raise RankFailedError(f"ranks {silent} ended without an outcome\n{_logs(folder)}")
        return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(nproc)]


def run_under_msrun(
    script: Path, *arguments: str, folder: Path, nproc: int, timeout: float
) -> None:
    """Run a script on several processes of this machine; all are killed if one does not end.

    Once more if they failed before one of them came back from
    :func:`swap_testkit.mindspore.world.join`: on a busy machine MindSpore sometimes crashes there.

    Args:
        script: What each process runs.
        arguments: Of the script.
        folder: The ranks' logs come into its folder ``log``.
        nproc: How many processes.
        timeout: Seconds for everything.

    Raises:
        RankFailedError: a process failed or did not end in time.
    """
    try:
        _run_once(script, arguments, folder, nproc, timeout)
    except RankFailedError as error:
        if any(folder.glob(f"{JOINED}*")):
            raise
        _log.warning("no rank met the others; once more, after: %s", error)
        _run_once(script, arguments, folder, nproc, timeout)


def _run_once(
    script: Path, arguments: Sequence[str], folder: Path, nproc: int, timeout: float
) -> None:
    programs = str(Path(sys.executable).parent)
    command = [
        str(Path(programs) / "msrun"),
        *(f"--worker_num={nproc}", f"--local_worker_num={nproc}"),
        *(f"--master_port={_free_port()}", "--join=True", f"--log_dir={folder / 'log'}"),
        *(f"--cluster_time_out={int(timeout)}", str(script), *arguments),
    ]
    # msrun starts whatever `python` comes first.
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes tells where
        FOLDER_VARIABLE: str(folder),
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RankFailedError(
                    f"{nproc} ranks did not end within {timeout:g} s and were killed\n"
                    f"{_logs(folder)}"
                ) from error
            raise
    if process.returncode != 0:
        raise RankFailedError(f"{told[-_LOG_CHARACTERS:]}\n{_logs(folder)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _logs(folder: Path) -> str:
    logs: Sequence[Path] = sorted((folder / "log").glob("worker*"))
    return "\n".join(f"{log.name}:\n{log.read_text()[-_LOG_CHARACTERS:]}" for log in logs)
