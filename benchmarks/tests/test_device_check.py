# SPDX-License-Identifier: Apache-2.0
"""The check of a machine with a card, as far as it can be tested without one.

``nox -s align`` rehearses the whole; these are the parts in which a card differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_align
import device_check
import device_common
import device_environment
import device_order
import device_peers
import device_speed
import peers
import pytest
import torch
from device_check import SECTIONS, Outcome, Section
from torch.autograd import DeviceType

from swap_core import SwapOptimizerConfig
from swap_core.config import SCHEDULES

CARD = SimpleNamespace(simulated=False, asked="cuda", kind="cuda", left=lambda: float("inf"))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool | None]]:
    """What the sections tell."""
    told: list[tuple[str, str, bool | None]] = []

    def row(what: str, value: object, ok: bool | None = None, *, headline: bool = False) -> None:
        told.append((what, str(value), ok))

    for module in (device_align, device_peers, device_speed):
        monkeypatch.setattr(module, "row", row)
    return told


# The time of all.


def given(minutes: float, used: float) -> list[float]:
    """The limits of all sections, if each uses a part of what it may."""
    left, limits = 60 * minutes, []
    for number, section in enumerate(SECTIONS):
        limits.append(device_check.limit(section, SECTIONS[number + 1 :], left))
        left -= used * limits[-1]
    assert left >= 0
    return limits


@pytest.mark.parametrize("used", [0.3, 1.0])
def test_every_section_has_time_whatever_those_before_it_take(used: float) -> None:
    limits = given(device_check.MINUTES, used)
    for section, limit in zip(SECTIONS, limits, strict=True):
        assert section.least <= limit <= section.most, section
    if used == 0.3:
        assert limits[3:] == [section.most for section in SECTIONS[3:]]


def test_with_less_time_those_that_matter_most_have_it() -> None:
    limits = given(2, 1.0)
    first = next(number for number, limit in enumerate(limits) if limit == 0)
    assert [section.name for section in SECTIONS[:3]] == ["environment", "link", "align"]
    assert first >= 3
    assert not any(limits[first:])


# What was found when a section is ended.

HANGS = """
import json, sys, time
print("noise @{", flush=True)
for number in range(2):
    found = {"what": f"row {number}", "value": "1", "ok": True, "headline": True}
    print("warning " * number + "@" + json.dumps(found), flush=True)
print('@{"what": "cut off', end="", flush=True)
time.sleep(100)
"""


def test_what_a_section_found_is_kept_and_told_when_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setattr(device_check, "HERE", tmp_path)
    seen: list[tuple[int, str]] = []

    def told(outcome: Outcome) -> None:
        seen.append((len(outcome.rows), outcome.problem))

    section = Section("hang", "hangs.py", 1, 1)
    outcome = device_check.run(section, 1.5, {}, tmp_path, "sim", told)
    assert [row["what"] for row in outcome.rows] == ["row 0", "row 1"]
    # While it ran, so that they are written even if the whole check is ended.
    assert seen
    assert seen[-1] == (2, "still running")
    assert not outcome.passed
    assert (
        device_check.summary([outcome, Outcome("next", problem=device_check.LATE)], tmp_path) == 1
    )
    table = capsys.readouterr().out
    assert "| hang | FAILED; ended after 2 s, 2 results until then |" in table
    assert "Not done, or not to the end, for lack of time: hang, next." in table


# Bits.


def test_scenarios_have_their_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SwapOptimizerConfig] = []

    def scenario_on_rank(*arguments: Any) -> list[Any]:
        asked.extend(arguments[-1])
        return []

    monkeypatch.setattr(device_align, "scenario_on_rank", scenario_on_rank)
    device_align.compared(CARD, device_align.SCENARIOS["schedules"], ["adamw"])
    plain = SwapOptimizerConfig()
    unused = [f for f in SCHEDULES if all(getattr(c, f) == getattr(plain, f) for c in asked)]
    assert not unused


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the section with findings that are given by name."""

    def run(findings: dict[str, tuple[Any, str]], place: Any = CARD) -> None:
        def judged(_: Any, scenario: Any) -> tuple[Any, str]:
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            return findings[scenario.name]

        scenarios = {name: device_align.SCENARIOS[name] for name in findings}
        monkeypatch.setattr(device_align, "judged", judged)
        monkeypatch.setattr(device_align, "SCENARIOS", scenarios)
        monkeypatch.setattr(device_align, "process_group", lambda *_: nullcontext())
        device_align.align(place)

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "0")
    yield run
    torch.use_deterministic_algorithms(False)


def test_scenarios_that_are_not_judged_are_counted(align: Any, rows: list[Any]) -> None:
    verdict = device_align.Verdict
    align(
        {
            "fsdp": (verdict.UNJUDGED, "two native trainings differ"),
            "single": (verdict.ALIGNED, "equal bits"),
            "hsdp": (verdict.IMPOSSIBLE, "ValueError"),
        }
    )
    assert rows == [
        ("single", "equal bits", True),
        ("fsdp", "not judged: two native trainings differ", None),
        ("hsdp", "not on one process, also natively: ValueError", None),
        ("scenarios aligned", "1 of 1; 1 not judged, 1 not on one process", True),
    ]


def test_a_scenario_that_differs_is_told_at_once(align: Any, rows: list[Any]) -> None:
    verdict = device_align.Verdict
    align({"single": (verdict.DIFFERS, "bad"), "groups": (verdict.ALIGNED, "equal bits")})
    assert rows[0] == ("single", "not aligned: bad", False)
    assert rows[-1] == ("scenarios aligned", "1 of 2", False)


def test_a_scenario_for_one_process_that_cannot_be_trained_is_a_failure(
    align: Any, rows: list[Any]
) -> None:
    verdict = device_align.Verdict
    align({"single": (verdict.IMPOSSIBLE, "no kernel"), "groups": (verdict.ALIGNED, "")})
    assert rows[0] == ("single", "not on one process, also natively: no kernel", False)
    assert rows[-1] == ("scenarios aligned", "1 of 1; 1 not on one process", True)


def test_scenarios_for_which_no_time_is_left_are_named(align: Any, rows: list[Any]) -> None:
    left = iter([100.0, 1.0, 1.0])
    place = SimpleNamespace(**{**vars(CARD), "left": lambda: next(left)})
    align(dict.fromkeys(["single", "groups", "fsdp"], (device_align.Verdict.ALIGNED, "")), place)
    assert rows[1:] == [
        ("scenarios aligned", "1 of 1", True),
        ("not done for lack of time", "2: groups, fsdp", False),
    ]


def test_native_trainings_that_differ_or_fail_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict, scenario = device_align.Verdict, device_align.SCENARIOS["single"]
    place = SimpleNamespace(simulated=False, asked="cpu")
    assert device_align.native_problem(place, scenario) is None
    runs = iter(["one", "other"])
    monkeypatch.setattr(device_align, "record_run", lambda *_: next(runs))
    monkeypatch.setattr(device_align, "compare_runs", lambda *_: ["loss differs"])
    assert device_align.native_problem(place, scenario) == (
        verdict.UNJUDGED,
        "two native trainings: loss differs",
    )
    problem = device_align.native_problem(place, scenario)  # no third run: it raises
    assert problem is not None
    assert problem[0] is verdict.IMPOSSIBLE


# What a card tells otherwise than the simulated accelerator.


def test_ranges_are_counted_once_where_a_profiler_sees_them_on_the_device_too() -> None:
    events = [
        SimpleNamespace(name=name, device_type=kind)
        for kind in (DeviceType.CPU, DeviceType.CUDA)
        for name in ("swap.load[0]", "swap.update[0]", "swap.store[0]", "aten::mul_")
    ]
    assert device_order.ranges_of_host(events) == 3


def figures(reserved: int | None) -> Any:
    return device_speed.Figures(1.0, 1.0, 1.0, 0, 0, reserved, 0)


def test_what_the_allocator_reserves_is_told_where_it_tells(rows: list[Any]) -> None:
    report = SimpleNamespace(
        resident_bytes=0, states=[], peak_device_bytes=1, swapped_bytes=1, host_bytes=1
    )
    device_speed.tell_memory(figures(3 << 20), figures(2 << 20), report)
    reserved = [(what, value) for what, value, _ in rows if "reserved" in what]
    assert reserved == [
        ("reserved by the allocator at most, natively", "3.0 MiB"),
        ("reserved by the allocator at most, swapped", "2.0 MiB"),
    ]
    rows.clear()
    device_speed.tell_memory(figures(None), figures(None), report)
    assert not [what for what, *_ in rows if "reserved" in what]


def test_states_are_narrower_where_pinning_them_takes_the_section_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any]
) -> None:
    monkeypatch.setattr(device_speed, "available_host_bytes", lambda: 128 << 30)
    place = SimpleNamespace(
        simulated=False, out=tmp_path, left=lambda: 90.0, free_and_total=lambda: (138 << 30, 0)
    )
    assert device_speed.fitting_dtype(place, 4e9) is torch.float32
    for rate, dtype in ((3e9, torch.float32), (0.8e9, torch.bfloat16), (0.1e9, None)):
        (tmp_path / "link.json").write_text(json.dumps({"pin": rate}))
        assert device_speed.fitting_dtype(place, 4e9) is dtype
    assert rows[-1][0] == "not run"


def test_a_program_that_hangs_does_not_stop_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_environment, "PATIENCE", 0.1)
    assert "timed out" in device_environment.output_of("sleep", "5")
    assert device_environment.output_of("no-such-program-here")


def test_memory_of_the_host_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_common, "available_host_memory", lambda: 7)
    assert device_common.available_host_bytes() == 7


# Peers.


def test_peers_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def in_process(name: str, *_: object) -> dict[str, Any]:
        ran.append(name)
        return {"runs": False, "reason": "no"}

    monkeypatch.setattr(peers, "in_process", in_process)
    results = iter(peers.run_all(argparse.Namespace(only=None)))
    assert next(results)["name"] == ran[0]
    assert len(ran) == 1


def test_peers_that_are_not_installed_cost_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_version", lambda _: None)
    monkeypatch.setattr(peers.subprocess, "run", None)
    told = peers.in_process("DeepSpeed CPU Adam", Path("none"), argparse.Namespace())
    assert told == {"runs": False, "reason": "not installed"}


def test_a_peer_has_no_more_time_than_its_section(
    monkeypatch: pytest.MonkeyPatch, rows: list[Any]
) -> None:
    given: list[float] = []

    def run_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for name in ("torch AdamW, fused", "swap_torch, packed"):
            given.append(args.seconds)
            yield {"name": name, "runs": False, "reason": "slow"}

    monkeypatch.setattr(peers, "run_all", run_all)
    left = iter([100.0, 20.0, 3.0])
    device_peers.peers(SimpleNamespace(**{**vars(CARD), "left": lambda: next(left)}))
    assert given == [60.0, 15.0]
    assert [ok for *_, ok in rows] == [None, False]
