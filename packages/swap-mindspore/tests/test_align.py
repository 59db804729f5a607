# SPDX-License-Identifier: Apache-2.0
"""The testkit on MindSpore trainings: what it compares, finds, tells and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from swap_mindspore import SwapOptimizerConfig
from swap_testkit import align, assert_aligned
from swap_testkit.cli import main
from swap_testkit.mindspore import Job
from swap_testkit.mindspore.optimizers import OPTIMIZERS
from swap_testkit.mindspore.record import array_of
from swap_testkit.mindspore.rows import RFC_ROWS
from swap_testkit.mindspore.scenarios import SCENARIOS

SMALL = SwapOptimizerConfig(min_numel=0, swap_times=3)
ALIGN = ["align", "--framework", "mindspore", "--swap-times", "3", "--min-numel", "16"]


class Net(nn.Cell):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(8, 8) for _ in range(3)])
        values = np.random.default_rng(seed)
        for param in self.get_parameters():
            param.set_data(Tensor(values.standard_normal(param.shape).astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


def loss(net: nn.Cell, batch: Tensor) -> Tensor:
    return (net(batch) ** 2).mean()


def batch(step: int) -> Tensor:
    return Tensor(np.random.default_rng(step).standard_normal((4, 8)).astype(np.float32))


def good(seed: int) -> Job:
    return Job(Net(seed), lambda params: nn.Adam(params, 0.01), batch, loss, clip_norm=1.0)


made = 0


def bad(seed: int) -> Job:
    """Another training each time it is called."""
    global made
    made += 1
    return Job(Net(made), lambda params: nn.Adam(params, 0.01), batch, loss)


def no_job(seed: int) -> int:
    return seed


def test_a_training_is_aligned_and_smaller() -> None:
    alignment = assert_aligned(good, steps=3, config=SMALL, framework="mindspore")
    states = 2 * 4 * 3 * (64 + 8)
    assert alignment.compared == 6 + 12 + 4  # parameters, moments, counters and lr
    assert len(alignment.losses) == 3
    assert alignment.native_memory.idle == alignment.native_memory.peak == states
    assert alignment.swapped_memory.idle == 0
    assert alignment.swapped_memory.host == states
    assert 0 < alignment.swapped_memory.peak < states
    assert alignment.title.endswith("good, per tensor x3")


def test_a_difference_is_found_where_it_began() -> None:
    alignment = align(bad, steps=2, config=SMALL, framework="mindspore")
    assert not alignment.aligned
    assert {mismatch.step for mismatch in alignment.mismatches} == {0}
    assert "loss" in {mismatch.name for mismatch in alignment.mismatches}
    with pytest.raises(AssertionError, match="NOT aligned"):
        assert_aligned(bad, steps=1, config=SMALL, framework="mindspore")


def test_a_swap_that_forgets_to_load_is_found(monkeypatch) -> None:
    from swap_mindspore import HostDevice

    monkeypatch.setattr(HostDevice, "copy_in", lambda self, stream, transfers: None)
    alignment = align(good, steps=2, config=SMALL, framework="mindspore")
    names = {mismatch.name for mismatch in alignment.mismatches}
    assert any(name.startswith("moment1") for name in names)
    assert min(mismatch.step for mismatch in alignment.mismatches) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"nproc": 2}, ValueError, "on this process only"),
        ({"parallel": "ddp"}, ValueError, "on this process only"),
        ({"device": "ascend"}, ValueError, "device_target is 'cpu'"),
        ({"framework": "jax"}, ValueError, "'torch' or 'mindspore'"),
        ({"builder": no_job}, TypeError, r"swap_testkit\.mindspore\.Job"),
        ({"steps": 0}, ValueError, "an integer >= 1"),
    ],
)
def test_arguments_that_are_refused(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        align(**{"builder": good, "framework": "mindspore", **arguments})


ON_ONE = [name for name, scenario in SCENARIOS.items() if 1 in scenario.worlds]
NATIVE = [name for name, kind in OPTIMIZERS.items() if not kind.mindformers]


@pytest.mark.parametrize(
    ("scenario", "optimizer"), [(name, NATIVE[i % 4]) for i, name in enumerate(ON_ONE)]
)
def test_a_scenario_is_aligned(scenario, optimizer, capsys) -> None:
    arguments = ["--scenario", scenario, "--steps", "2", "--optimizer", optimizer]
    assert main([*ALIGN, *arguments]) == 0
    told = capsys.readouterr().out
    assert f"mindspore {scenario}, {optimizer}, per tensor x3: aligned (exact): 2 losses" in told
    assert "1 of 1 (exact)" in told


def test_a_builder_on_the_command_line_and_its_report(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "my_net.py").write_text(Path(__file__).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    builder = ["--builder", "my_net:good", "--steps", "2", "--report", "out"]
    assert main([*ALIGN, *builder]) == 0
    assert "my_net:good, per tensor x3: aligned" in capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "alignment.json").read_text())
    assert data["machine"]["mindspore"] == ms.__version__
    assert (tmp_path / "out" / "alignment.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "fsdp"], "'fsdp' is unknown; there are: all, single"),
        (["--scenario", "single", "--optimizer", "sgd"], "'sgd' is unknown"),
        (["--scenario", "single", "--nproc", "2"], r"none of these scenarios runs on [2]"),
        (["--builder", "my_net:good", "--nproc", "2"], "for torch"),
        (["--scenario", "fully-shard"], "'fully-shard' runs on Ascend cards only"),
        (["--scenario", "single", "--device", "ascend"], "device_target is 'cpu'"),
        (
            ["--scenario", "single", "--optimizer", "adam", "--packed"],
            "packed_swap=True is not supported",
        ),
    ],
)
def test_commands_that_are_refused(arguments, words, capsys) -> None:
    assert main([*ALIGN, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_scenarios_are_listed(capsys) -> None:
    assert main(["scenarios", "--framework", "mindspore"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SCENARIOS)


def test_without_cards_the_rows_are_listed_and_nothing_is_run(capsys) -> None:
    assert main(["cards", "--framework", "mindspore"]) == 1
    assert main(["cards", "--framework", "mindspore", "--allow-no-cards"]) == 0
    told = capsys.readouterr().out
    assert "no Ascend card here" in told
    assert told.count("not run") == 2 * len(RFC_ROWS) == 22


def test_rows_name_scenarios_and_optimizers_that_exist() -> None:
    for row in RFC_ROWS.values():
        assert set(row.optimizers) <= set(OPTIMIZERS)
        assert all(row.nproc in SCENARIOS[name].worlds for name in row.scenarios)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.bfloat16, ms.int32])
def test_arrays_hold_the_bits(dtype) -> None:
    value = Parameter(Tensor([[1.5, -2.0], [0.0, 3.0]], ms.float32).astype(dtype))
    array = array_of(value)
    assert array.dtype == str(dtype).lower()
    expected = [[1.5, -2.0], [0.0, 3.0]] if dtype != ms.int32 else [[1, -2], [0, 3]]
    assert array.values().tolist() == expected
    value.set_data(Tensor(np.zeros((2, 2), np.float32)).astype(dtype))
    assert array.values().tolist() == expected


def test_the_public_names_of_the_kit_are_these() -> None:
    import swap_testkit.mindspore as kit

    assert kit.__all__ == ["Job", "MindSporeRecordingDevice", "record_updates", "region_of"]


def test_the_kit_runs_without_torch() -> None:
    code = (
        "import sys, swap_testkit.cli, swap_testkit.mindspore.align; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
