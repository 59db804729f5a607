# SPDX-License-Identifier: Apache-2.0
"""What of the options each of several kinds of optimizers gets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from _small import bits, parts, train
from muon_llama3 import WithMuon
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import ConfigManager

from swap_core import UnknownStateKeyError, UnsupportedOptionError
from swap_testkit.torch import CpuAsDevice
from swap_torch import is_swap_optimizer
from swap_torch.integrations.torchtitan import swap_config
from swap_torch.integrations.torchtitan.container import SwapMixin

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*swap_optimizer"),
]

WITHOUT_CODE = ("--module", "swap_torch.integrations.torchtitan", "--optimizer.swap-optimizer")
MUON = (*WITHOUT_CODE, "--config", "muon_llama3.debugmodel")
MOMENTS = ("exp_avg", "exp_avg_sq")


class LateMuon(WithMuon):
    """One whose Muon only the container can build."""

    @dataclass(kw_only=True, slots=True)
    class Config(WithMuon.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        if name == "Muon":
            return lambda groups: torch.optim.Muon(groups)
        return OptimizersContainer._resolve_optimizer_factory(name)


@pytest.fixture(autouse=True)
def _cpu_as_device(monkeypatch):
    monkeypatch.setattr(SwapMixin, "swap_device", lambda _: CpuAsDevice())


def config(base=WithMuon, **options):
    kinds = {"weight": "Muon", ".*": "AdamW"}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 0.01})
        for pattern, name in kinds.items()
    ]
    return base.Config(param_groups=groups, **options)


def only_muon():
    return WithMuon.Config(param_groups=config().param_groups[:1])


def trained(config):
    model_parts = parts()
    optimizers = config.build(model_parts=model_parts)
    train(optimizers, model_parts, 3)
    return optimizers


def swapped(config, **options):
    return trained(swap_config(config, swap_optimizer=True, swap_optimizer_min_numel=0, **options))


def swapping_states(optimizers):
    """For each kind the names of the states that swap; None where nothing was wrapped."""
    return {
        type(each).__name__: {state.key for state in each.swap_report().states if not state.stays}
        if is_swap_optimizer(each)
        else None
        for each in optimizers
    }


@pytest.mark.parametrize("keys", ["exp_avg,exp_avg_sq", "momentum_buffer,exp_avg"])
def test_the_command_line_takes_names_that_some_optimizer_has(keys):
    found = ConfigManager().parse_args([*MUON, "--optimizer.swap-optimizer-state-keys", keys])
    assert found.optimizer.swap_optimizer_state_keys == keys.split(",")


@pytest.mark.parametrize("base", [WithMuon, LateMuon])
@pytest.mark.parametrize(
    ("keys", "muon", "adamw"),
    [
        (None, {"momentum_buffer"}, {*MOMENTS}),
        (["momentum_buffer", *MOMENTS], {"momentum_buffer"}, {*MOMENTS}),
        (["exp_avg", "momentum_buffer"], {"momentum_buffer"}, {"exp_avg"}),
        (["exp_avg_sq"], None, {"exp_avg_sq"}),
        (["momentum_buffer"], {"momentum_buffer"}, None),
    ],
)
def test_each_optimizer_swaps_those_of_its_states_that_are_named(base, keys, muon, adamw):
    native, ours = trained(config(base)), swapped(config(base), swap_optimizer_state_keys=keys)
    assert swapping_states(ours) == {"Muon": muon, "AdamW": adamw}
    assert bits(ours.state_dict()) == bits(native.state_dict())


def test_one_without_states_that_are_named_is_in_the_log(caplog):
    with caplog.at_level("INFO"):
        swapped(config(), swap_optimizer_state_keys=["exp_avg"])
    message = "Muon does not swap: swap_optimizer_state_keys names none of its states"
    assert caplog.text.count(message) == 2  # for each model part


@pytest.mark.parametrize("base", [WithMuon, LateMuon])
def test_names_that_no_optimizer_has_are_refused(base):
    message = (
        r"optimizer\.swap_optimizer_state_keys names 'momentum', which no optimizer of this config "
        r"has; give some of momentum_buffer \(Muon\), exp_avg, exp_avg_sq \(AdamW\)"
    )
    with pytest.raises(UnknownStateKeyError, match=message):
        swapped(config(base), swap_optimizer_state_keys=["exp_avg", "momentum"])


def test_names_are_refused_before_a_model_exists():
    with pytest.raises(UnknownStateKeyError, match="names 'momentum'"):
        swap_config(config(), swap_optimizer=True, swap_optimizer_state_keys=["momentum"])


def test_zigzag_is_for_those_that_can(caplog):
    with caplog.at_level("INFO"):
        ours = swapped(config(), swap_optimizer_zigzag=True, swap_optimizer_times=2)
    zigzag = {type(each).__name__: each._swap.config.zigzag for each in ours}
    assert zigzag == {"Muon": False, "AdamW": True}
    assert bits(ours.state_dict()) == bits(trained(config()).state_dict())
    assert "Muon runs every update forwards, in spite of swap_optimizer_zigzag" in caplog.text
    assert "AdamW runs every update forwards" not in caplog.text


def test_zigzag_that_no_optimizer_can_is_refused():
    message = (
        r"optimizer\.swap_optimizer_zigzag=True changes the order of updates, which no optimizer "
        r"of this config \(Muon\) may; leave --optimizer\.swap-optimizer-zigzag out"
    )
    with pytest.raises(UnsupportedOptionError, match=message) as raised:
        swap_config(only_muon(), swap_optimizer=True, swap_optimizer_zigzag=True)
    assert "prefetch" not in str(raised.value)
