# SPDX-License-Identifier: Apache-2.0
"""``python -m swap_core plan``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swap_core.cli import main
from swap_core.plan_command import add_plan
from swap_core.trace_command import add_trace

LINK = ["--load-gbps", "25", "--store-gbps", "25"]
MODEL = ["--params", "7e9", "--param-dtype", "bf16", "--shards", "8"]


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def rows(told: list[str]) -> dict[int, list[str]]:
    cells = [[cell.strip() for cell in line.split("|")] for line in told]
    return {int(row[0]): row[1:] for row in cells if row[0].isdigit()}


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "swap_core", "plan", *MODEL, *LINK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Recommended: swap_times=" in done.stdout
    assert "not a measurement" in done.stdout


@pytest.mark.parametrize("params", ["1e5", "1e6", "7e9"])
def test_the_recommendation_is_a_row_of_the_table(
    capsys: pytest.CaptureFixture[str], params: str
) -> None:
    told = lines(capsys, "--params", params, "--param-dtype", "bf16", "--shards", "8", *LINK)
    (said,) = [line for line in told if line.startswith("Recommended: ")]
    updates = {times: float(row[1]) for times, row in rows(told).items()}
    # More batches never take more memory, so of those that are nearly the fastest the most.
    near = 1.05 * min(updates.values())
    best = max(times for times, update in updates.items() if update <= near)
    assert said.startswith(f"Recommended: swap_times={best}, with {rows(told)[best][0]} of ")


def test_memory_is_what_the_model_and_the_shards_say(capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, "--params", "8192", "--tensors", "8", "--param-dtype", "fp32", *LINK)
    assert "64.0 KiB of states per device" in told[0]
    assert "64.0 KiB of pinned host memory per node of 1 devices" in told[1]
    # 8 parameters of 8 KiB: 4 batches of two, 8 of one; two arenas.
    table = rows(told)
    assert list(table) == [4, 8, 16, 32, 64, 128]
    assert [row[0] for row in table.values()] == ["32.0 KiB", *["16.0 KiB"] * 5]

    sharded = lines(
        capsys, "--params", "8192", "--tensors", "8", "--param-dtype", "fp32", "--shards", "4",
        "--devices-per-node", "2", "--states", "3", *LINK,
    )  # fmt: skip
    assert "24.0 KiB of states per device" in sharded[0]
    assert "48.0 KiB of pinned host memory per node of 2 devices" in sharded[1]


def test_times_follow_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    def update(*arguments: str) -> float:
        table = rows(lines(capsys, *MODEL, *arguments))
        return float(table[16][1].replace(",", ""))

    usual = update(*LINK)
    assert update("--load-gbps", "50", "--store-gbps", "50") < 0.6 * usual
    assert update(*LINK, "--no-duplex") > 1.8 * usual
    assert update(*LINK, "--state-dtype", "fp32") > 1.9 * usual
    assert update(*LINK, "--largest", "3.5e9") > 1.2 * usual
    assert update("--preset", "h100-sxm") < update("--preset", "a100-80gb")
    assert update("--preset", "h100-sxm", *LINK) == pytest.approx(usual, rel=0.1)


def test_the_cost_is_told_as_a_part_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    def recommendation(*arguments: str) -> str:
        told = lines(capsys, *MODEL, *LINK, *arguments)
        return next(line for line in told if line.startswith("Recommended"))

    added = float(recommendation().split(" ms more")[0].split()[-1].replace(",", ""))
    assert f", {100 * added / 1000:.1f} % of a step." in recommendation("--step-ms", "1000")
    assert "%" not in recommendation()


def test_more_arenas_need_more_memory(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--params", "8192", "--tensors", "8", "--param-dtype", "fp32", *LINK]
    assert rows(lines(capsys, *small, "--staging-buffers", "4"))[8][0] == "32.0 KiB"


def test_an_arena_more_is_recommended_where_it_makes_updates_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(*arguments: str) -> list[str]:
        return lines(capsys, "--params", "7e9", *arguments)

    # The update of a batch takes a tenth of its load there: see docs/how-it-works.md.
    two, three = told("--preset", "l40s"), told("--preset", "l40s", "--staging-buffers", "3")
    (said,) = [line for line in two if "staging_buffers=3" in line]
    (there,) = [line for line in three if line.startswith("Recommended: ")]
    peak, added = rows(three)[128][0], rows(three)[128][3]
    assert f"swap_times=128, with {peak} " in there
    assert said == (
        f"With staging_buffers=3 as well: {peak} of device memory in an update, {added} ms more "
        f"per step."
    )
    # With three it is as fast as copies are; where kernels are fast, with two.
    assert not any("staging_buffers" in line for line in three + told("--preset", "h200"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said to arguments that are refused; nothing else may have been said."""
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "7e9"], ("--load-gbps is missing", "h200")),
        (["--params", "10", "--largest", "11", *LINK], ("--largest 11", "the model has 10")),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, "plan", *arguments)
    assert all(word in error for word in words)


def numeric(add: Callable[[argparse.ArgumentParser], None]) -> list[argparse.Action]:
    """The flags of a command that take a number, those that are added later too."""
    parser = argparse.ArgumentParser()
    add(parser)
    return [
        action
        for action in parser._actions
        if action.option_strings
        and action.nargs is None
        and action.choices is None
        and action.type is not Path
    ]


NUMERIC = {
    action.option_strings[-1]: (command, action)
    for command, add in (
        (["plan", *MODEL, *LINK], add_plan),
        (["trace", "no-such-file"], add_trace),
    )
    for action in numeric(add)
}


def test_the_numeric_flags_are_found() -> None:
    assert {"--params", "--largest", "--load-gbps", "--staging-buffers", "--update"} <= {*NUMERIC}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-4", "-1e300", "1e300", "x", ""])
@pytest.mark.parametrize("flag", NUMERIC)
def test_what_is_no_possible_number_is_refused_by_the_name_of_its_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _ = NUMERIC[flag]
    error = refusal(capsys, *command, f"{flag}={value}")
    assert f"{flag}: {value!r} is not accepted; give a" in error


def is_sane(told: str) -> bool:
    """Nothing infinite, nothing below 0, nothing that is not a number."""
    return re.search(r"\b(nan|inf)\b|(^|[\s:])-\d", told) is None


PLANNED = {flag: action for flag, (command, action) in NUMERIC.items() if command[0] == "plan"}


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("flag", PLANNED)
def test_a_small_number_is_refused_or_planned_with(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["plan", *MODEL, *LINK, f"{flag}={value}"])
    except SystemExit:
        assert f"{flag}: {value!r} is not accepted; give a" in capsys.readouterr().err
    else:
        assert (code, is_sane(capsys.readouterr().out)) == (0, True)


@pytest.mark.parametrize("end", ["least", "most"])
@pytest.mark.parametrize("flag", PLANNED)
def test_the_least_and_the_most_that_are_accepted_can_be_planned_with(
    flag: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = getattr(PLANNED[flag].type, end)
    # As many parameters as there may be: then any number of the largest tensor is possible.
    assert main(["plan", *MODEL, "--params=1e15", *LINK, f"{flag}={value!r}"]) == 0
    assert is_sane(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--params", "0"],
        ["--params", "1.5"],
        ["--tensors", "0"],
        ["--largest", "0"],
        ["--states", "0"],
        ["--shards", "0"],
        ["--shards", "2.5"],
        ["--devices-per-node", "0"],
        ["--step-ms", "0"],
        ["--load-gbps", "0"],
        ["--store-gbps", "0"],
        ["--memory-gbps", "0"],
        ["--staging-buffers", "0"],
        ["--staging-buffers", "1"],
    ],
    ids=" ".join,
)
def test_what_is_below_the_least_or_not_whole_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag, value = arguments
    assert f"{flag}: {value!r} is not accepted" in refusal(
        capsys, "plan", *MODEL, *LINK, *arguments
    )


def test_whole_numbers_may_have_an_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, *MODEL, *LINK, "--tensors", "3e2") == lines(capsys, *MODEL, *LINK)


@pytest.mark.parametrize("command", [["plan", *MODEL, *LINK], ["trace", "no-such-file"]])
def test_a_picture_needs_matplotlib_and_that_is_known_before_anything_is_done(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal(capsys, *command, "--plot", str(tmp_path / "plan.png"))
    assert "pip install 'matplotlib>=3.8'" in error


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.png"
    assert main(["plan", *MODEL, *LINK, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
