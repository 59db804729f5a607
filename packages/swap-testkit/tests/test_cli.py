# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, output, files, refusals; and the pytest plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swap_testkit.cli import main
from swap_testkit.torch.run import present_cards

pytest_plugins = ["pytester"]

SMALL = ["--steps", "2", "--swap-times", "3", "--min-numel", "16"]

JOB = """
import torch
from torch import nn
from swap_testkit.torch import Job

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

made = 0

def good(seed):
    return Job(Net(), torch.optim.AdamW, batch, loss)

def bad(seed):
    global made
    made += 1
    return Job(Net(), lambda ps: torch.optim.AdamW(ps, lr=1e-3 * made), batch, loss)

def batch(step):
    return torch.full((2, 8), float(step + 1))

def loss(model, x):
    return model(x).square().mean()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"job_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_an_aligned_builder_exits_with_0_and_leaves_a_report(
    job: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = ["--report", str(tmp_path / "report")]
    assert main(["align", "--builder", f"{job}:good", *SMALL, *report]) == 0
    output = capsys.readouterr().out
    assert f"{job}:good, packed x3: aligned (exact): 2 losses" in output
    assert "2 of 2 (exact)" in output
    stored = json.loads((tmp_path / "report" / "alignment.json").read_text())
    assert [entry["variant"] for entry in stored["alignments"]] == ["packed x3", "per tensor x3"]
    assert (tmp_path / "report" / "alignment.png").stat().st_size > 1000


def test_one_way_of_swapping_can_be_chosen(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["align", "--builder", f"{job}:good", "--per-tensor", *SMALL]) == 0
    output = capsys.readouterr().out
    assert "per tensor x3" in output
    assert "packed" not in output


def test_a_builder_runs_on_several_processes(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--parallel", "ddp", "--nproc", "2", "--packed"]
    assert main(["align", "--builder", f"{job}:good", *how, *SMALL]) == 0
    assert f"{job}:good, ddp on 2, packed x3: aligned" in capsys.readouterr().out


def test_a_difference_exits_with_1_and_is_told(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["align", "--builder", f"{job}:bad", "--packed", *SMALL]) == 1
    output = capsys.readouterr().out
    assert "NOT aligned (exact)" in output
    assert "from step 0 on: layers.0.weight at [" in output
    assert "0 of 1 (exact)" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "fdsp"], ("'fdsp' is unknown", "fsdp")),
        (["--scenario", "fsdp", "--optimizer", "sdg"], ("'sdg' is unknown", "adamw")),
        (["--scenario", "single", "--swap-times", "0"], ("swap_times=0", "integer >= 1")),
        (["--builder", "no_colon"], ("'no_colon'", "package.module:function")),
    ],
)
def test_bad_arguments_exit_with_2_and_say_what_is_accepted(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["align", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("swap_testkit: ")
    assert all(word in message for word in words)


def test_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("fsdp-tp", "pp-interleaved", "context parallel"))


@pytest.mark.skipif(present_cards()[1] > 0, reason="this machine has accelerators")
def test_without_cards_the_cards_command_succeeds_only_when_asked_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["cards"]) == 1
    assert "no accelerator here, so nothing was run" in capsys.readouterr().out
    assert main(["cards", "--allow-no-cards"]) == 0


def test_the_plugin_gives_a_fixture_and_a_line_for_each_alignment(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(my_job=JOB)
    pytester.makepyfile(
        """
        import pytest
        from my_job import bad, good

        def test_good(assert_aligned):
            assert assert_aligned(good, steps=2).compared == 24

        def test_bad(assert_aligned):
            with pytest.raises(AssertionError, match="NOT aligned"):
                assert_aligned(bad, steps=2)
        """
    )
    result = pytester.runpytest_subprocess("-q")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["*swap alignment*", "my_job:good, packed x16: 2 losses and 24 tensors equal (exact)*"]
    )
    assert "my_job:bad" not in result.stdout.str()
