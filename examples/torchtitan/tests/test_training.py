# SPDX-License-Identifier: Apache-2.0
"""torchtitan's trainer, native and swapped: the same bits, uninterrupted and resumed.

A selection of what ``matrix.py`` runs, for the torch that the other tests use.
"""

from __future__ import annotations

import pytest
from _check import BITS, check
from _processes import train
from _scenarios import SCENARIOS
from _trace import read_traces

SELECTED = {
    "cpu, 1 process": ("cpu", ["AdamW, fused"]),
    "sim, 1 process": (
        "sim",
        [
            "several param groups",
            "Muon and AdamW",
            "asynchronous checkpoints, pinned",
        ],
    ),
    "sim, 2 processes": ("sim", ["FSDP2, partial_dtensor", "expert parallel, partial_dtensor"]),
}


@pytest.mark.parametrize("selection", SELECTED)
def test_same_bits_also_when_resumed_from_each_other(selection, assets, tmp_path):
    device, names = SELECTED[selection]
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in names]
    outcomes = check(scenarios, device, assets, tmp_path)
    assert len(outcomes) == len(names)
    assert {s.name: o for s, o in outcomes.items() if not o.same} == {}


def test_the_other_ways_in(assets, tmp_path):
    ours = ("--module", "titan_configs", "--config")
    override = 'swap_torch.integrations.torchtitan.swap_optimizer={"times": 4}'
    ways = {
        "native": [*ours, "llama3"],
        "one call": [*ours, "example"],
        "override": [*ours, "llama3", "--override.imports", override],
    }
    trainings = [
        [*arguments, "--training.steps", "2", "--dump-folder", str(tmp_path / name)]
        for name, arguments in ways.items()
    ]
    train(trainings, device="sim", nproc=1, assets=assets, logs=tmp_path / "logs")
    (native,) = read_traces(tmp_path / "native")
    for name in ("one call", "override"):
        (swapped,) = read_traces(tmp_path / name)
        assert [line["swapped"] for line in swapped] == [[True], [True]]
        assert [{key: line[key] for key in BITS} for line in swapped] == [
            {key: line[key] for key in BITS} for line in native
        ]
    assert [line["swapped"] for line in native] == [[False], [False]]
