# SPDX-License-Identifier: Apache-2.0
"""The three ways to the flags, and what is refused before a model is built."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass, fields

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.models.llama3.config_registry import llama3_debugmodel

TOUCHABLE = (OptimizersContainer, OptimizersContainer.Config, torch.optim.AdamW, torch.optim.Adam)
BEFORE = [dict(vars(each)) for each in TOUCHABLE]
assert "swap_torch.integrations.torchtitan" not in sys.modules

from swap_core import (  # noqa: E402
    SwapOptimizerConfig,
    UnsupportedOptimizerError,
    UnsupportedOptionError,
)
from swap_torch.integrations import torchtitan  # noqa: E402
from swap_torch.integrations.torchtitan import (  # noqa: E402
    SwapOptimizersContainer,
    config_registry,
    swap_config,
    swap_container,
    swap_optimizer,
)
from swap_torch.integrations.torchtitan.fields import SwapFields  # noqa: E402

# torchtitan and what it imports warn of much; what this library says is an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*swap_optimizer"),
]

WITHOUT_CODE = ("--module", "swap_torch.integrations.torchtitan")
STOCK = (*WITHOUT_CODE, "--config", "llama3.llama3_debugmodel")
ALL_FLAGS = (
    "--optimizer.swap-optimizer",
    *("--optimizer.swap-optimizer-times", "8"),
    *("--optimizer.swap-optimizer-state-keys", "exp_avg,exp_avg_sq"),
    *("--optimizer.swap-optimizer-min-numel", "0"),
    *("--optimizer.swap-optimizer-packed-swap", "False"),
    *("--optimizer.swap-optimizer-staging-buffers", "3"),
    "--optimizer.no-swap-optimizer-zigzag",
    *("--optimizer.swap-optimizer-device-budget", "0.25"),
    *("--optimizer.swap-optimizer-offload", "always"),
)
ALL_OPTIONS = SwapOptimizerConfig(
    swap_times=8,
    state_keys=("exp_avg", "exp_avg_sq"),
    min_numel=0,
    packed_swap=False,
    staging_buffers=3,
    device_budget=0.25,
)


def parse(*arguments):
    return ConfigManager().parse_args(list(arguments))


# Ways in.


def test_importing_changes_nothing_of_torchtitan_and_torch():
    assert [dict(vars(each)) for each in TOUCHABLE] == BEFORE


def test_the_public_names_are_these():
    names = ["SwapOptimizersContainer", "swap_config", "swap_container", "swap_optimizer"]
    assert torchtitan.__all__ == names


def test_without_code():
    config = parse(*STOCK, *ALL_FLAGS).optimizer
    assert config.swap_optimizer is True
    assert config.swap_options() == ALL_OPTIONS
    assert config._owner is SwapOptimizersContainer
    # The rest is as it was.
    stock = llama3_debugmodel().optimizer
    assert all(getattr(config, f.name) == getattr(stock, f.name) for f in fields(stock))


def test_without_code_and_flags_nothing_swaps():
    config = parse(*STOCK).optimizer
    assert config.swap_optimizer is False
    assert config.swap_options() == SwapOptimizerConfig()


def test_without_code_by_the_name_of_any_module():
    name = "torchtitan.models.llama3.llama3_debugmodel"
    assert parse(*WITHOUT_CODE, "--config", name, *ALL_FLAGS).optimizer.swap_optimizer is True


def test_one_call_in_a_config_function():
    config = parse("--module", "swapped_llama3", "--config", "debugmodel").optimizer
    assert config.swap_optimizer is True
    more = parse("--module", "swapped_llama3", "--config", "eight_billion", *ALL_FLAGS).optimizer
    assert more.swap_options() == ALL_OPTIONS


def test_the_flag_of_an_example_can_be_switched_off():
    arguments = ("--module", "swapped_llama3", "--config", "debugmodel")
    assert parse(*arguments, "--optimizer.no-swap-optimizer").optimizer.swap_optimizer is False


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("device-budget", "1000000"), {"device_budget": 1_000_000}),
        (("zigzag",), {"zigzag": True}),
        (("offload", "auto"), {"offload": "auto"}),
        (("packed-swap", "None"), {}),
        (("state-keys", "None"), {}),
    ],
)
def test_values_of_other_types(flags, options):
    name, *values = flags
    config = parse(*STOCK, f"--optimizer.swap-optimizer-{name}", *values).optimizer
    assert config.swap_options() == SwapOptimizerConfig(**options)
    assert type(config.swap_options().device_budget) is int


def test_override():
    target = 'swap_torch.integrations.torchtitan.swap_optimizer={"times": 8, "min_numel": 0}'
    config = parse(
        *("--module", "llama3", "--config", "llama3_debugmodel", "--override.imports", target)
    )
    apply_overrides(config.override, config)  # as the trainer does
    assert config.optimizer.swap_optimizer is True
    assert config.optimizer.swap_options() == SwapOptimizerConfig(swap_times=8, min_numel=0)


def test_an_option_that_the_override_does_not_have():
    with pytest.raises(ValueError, match="'time' is not accepted; give some of times, state_keys"):
        swap_optimizer(default_adamw(), time=8)


def test_every_option_has_a_field_with_its_default():
    defaults = SwapOptimizerConfig()
    options = {field.name for field in fields(SwapOptimizerConfig)}
    # A container takes no closure, and torch's optimizers own no master parameters. torchtitan puts
    # the backward pass into CUDA graphs, and clips gradients after it.
    options -= {"allow_closure", "include_master_params", "prefetch", "overlap_backward"}
    names = {f"swap_optimizer_{name.removeprefix('swap_')}": name for name in options}
    ours = {field.name: field.default for field in fields(SwapFields)}
    assert ours.pop("swap_optimizer") is False
    assert ours == {name: getattr(defaults, option) for name, option in names.items()}


# Config functions.


def test_several_optimizers_of_one_config(monkeypatch):
    @dataclass(kw_only=True, slots=True)
    class Two(OptimizersContainer.Config.__mro__[1]):
        first: object
        more: list

    module = types.ModuleType("two_trainers")
    module.config = lambda: Two(first=default_adamw(), more=[default_adamw(lr=0.1)])
    module.none = lambda: Two(first=None, more=[])
    monkeypatch.setitem(sys.modules, "two_trainers", module)
    config = getattr(config_registry, "two_trainers.config")()
    assert isinstance(config.first, SwapFields)
    assert isinstance(config.more[0], SwapFields)
    assert config.more[0].param_groups[0].optimizer_kwargs["lr"] == 0.1
    with pytest.raises(ValueError, match=r"two_trainers.none: .*Two has no optimizer config"):
        getattr(config_registry, "two_trainers.none")()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3_debugmodel", r"give --config <module>.<function>, such as --config llama3\.llama"),
        ("llama9.debug", "'llama9' is neither a model of torchtitan nor a module"),
        ("llama3.llama9", r"no config function 'llama9'; it has llama3_debugmodel, "),
    ],
)
def test_names_that_do_not_exist(name, message):
    with pytest.raises(ValueError, match=message):
        parse(*WITHOUT_CODE, "--config", name)


def test_an_import_that_fails_inside_of_a_module_is_shown(tmp_path, monkeypatch):
    (tmp_path / "half_broken.py").write_text("import does_not_exist\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="does_not_exist"):
        _ = getattr(config_registry, "half_broken.config")


def test_names_of_the_language_are_not_looked_for():
    with pytest.raises(AttributeError):
        _ = config_registry.__wrapped__


# Refusals.


def group(name, **options):
    return ParamGroupConfig(pattern="w", optimizer_name=name, optimizer_kwargs=options)


def container_of(*groups, **options):
    return OptimizersContainer.Config(param_groups=list(groups), **options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--optimizer.swap-optimizer-times", "0"),
            "swap_optimizer_times: .*swap_optimizer_times=0 is",
        ),
        (("--optimizer.swap-optimizer-min-numel", "-1"), "swap_optimizer_min_numel: .*min_numel"),
        (
            ("--optimizer.swap-optimizer-staging-buffers", "1"),
            "optimizer.swap_optimizer_staging_buffers: .*an integer >= 2",
        ),
        (("--optimizer.swap-optimizer-device-budget", "-1"), "swap_optimizer_device_budget: "),
    ],
)
def test_values_are_checked_by_name(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(*STOCK, *flags)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "Error parsing optimizer" in said
    name = flags[0].removeprefix("--optimizer.").replace("-", "_")
    with pytest.raises(ValueError, match=message):
        swap_config(default_adamw(), **{name: int(flags[1])})


def test_fields_that_exclude_each_other():
    message = (
        "swap_optimizer_device_budget=8 is not accepted; give 0: swap_optimizer_offload='auto'"
    )
    with pytest.raises(ValueError, match=message):
        swap_config(default_adamw(), swap_optimizer_device_budget=8, swap_optimizer_offload="auto")
    message = "swap_optimizer_zigzag=True .* with swap_optimizer_packed_swap=False there is no"
    with pytest.raises(ValueError, match=message):
        swap_config(default_adamw(), swap_optimizer_zigzag=True, swap_optimizer_packed_swap=False)


# What only callers of swap_optimizer can do.
NOT_OF_TORCHTITAN = re.compile(r"prefetch|foreach=None|fused=None|state_dict\[|include_master")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            container_of(group("AdamW", lr=0.1), implementation="fused_opt_states_bf16"),
            UnsupportedOptionError,
            "optimizer.implementation='fused_opt_states_bf16' is not supported; use 'fused'",
        ),
        (
            container_of(group("AdamW", lr=0.1), group("DistMuon", lr=0.1)),
            UnsupportedOptimizerError,
            "optimizer_name='DistMuon' of the param group 'w' is not supported",
        ),
        (
            container_of(group("AdamW", lr=0.1), implementation="foreach"),
            UnsupportedOptionError,
            "param_groups 'w', which is AdamW with optimizer.implementation='foreach': foreach="
            "True is not supported; give --optimizer.implementation fused or for-loop",
        ),
        (
            container_of(group("Adam", lr=0.1)),
            UnsupportedOptionError,
            "param_groups 'w', which is Adam with optimizer.implementation='fused': fused=True "
            "is not supported; give --optimizer.implementation for-loop, or set 'fused': False in "
            "its optimizer_kwargs",
        ),
        (
            # What suits one group does not suit another.
            container_of(group("AdamW", lr=0.1), group("Adam", lr=0.1), implementation="foreach"),
            UnsupportedOptionError,
            "is AdamW .*foreach=True is not supported; give --optimizer.implementation for-loop, ",
        ),
        (
            container_of(group("AdamW", lr=0.1, foreach=True), implementation="for-loop"),
            UnsupportedOptionError,
            "is AdamW .*foreach=True is not supported; set 'foreach': False in its optimizer_kwarg",
        ),
        (
            container_of(group("AdamW", lr=0.1, capturable=True)),
            UnsupportedOptionError,
            "which is AdamW .*capturable=True",
        ),
    ],
)
def test_conflicts_are_refused_before_a_model_exists(config, error, message):
    swappable = swap_config(config)  # off: nothing to refuse
    with pytest.raises(error, match=message) as raised:
        swap_config(config, swap_optimizer=True)
    assert not NOT_OF_TORCHTITAN.search(str(raised.value))
    with pytest.raises(error, match=message):
        swap_config(swappable, swap_optimizer=True)
    # Set by hand afterwards: before anything is built.
    swappable.swap_optimizer = True
    with pytest.raises(error, match=message):
        swappable.build(model_parts=[])


def test_options_that_a_group_sets_itself_count():
    config = container_of(group("AdamW", lr=0.1, foreach=None), implementation="foreach")
    assert swap_config(config, swap_optimizer=True).swap_optimizer


def test_fields_that_do_not_exist():
    with pytest.raises(ValueError, match="'swap_time' is not accepted; give some of swap_optimize"):
        swap_config(default_adamw(), swap_time=8)


def test_what_is_no_optimizer_config():
    with pytest.raises(TypeError, match=r"Trainer.Config is not .*swap_config\(config.optimizer\)"):
        swap_config(llama3_debugmodel())


class StillFaultTolerant(TorchFTOptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTOptimizersContainer.Config):
        pass


@pytest.mark.parametrize("container", [TorchFTOptimizersContainer, StillFaultTolerant])
def test_fault_tolerance_is_refused_if_swapping_is_on(container):
    message = f"{container.__name__} .fault tolerance. is not supported: it keeps one state"
    config = swap_config(container.Config())
    assert isinstance(config, container.Config)
    assert config._owner is swap_container(container)
    with pytest.raises(UnsupportedOptimizerError, match=message):
        swap_config(container.Config(), swap_optimizer=True)
    config.swap_optimizer = True
    with pytest.raises(UnsupportedOptimizerError, match=message):
        config.build(model_parts=[], ft_manager=None)


def test_fault_tolerance_trains_without_code_and_flag():
    config = parse(*WITHOUT_CODE, "--config", "torchft.llama3.llama3_torchft_debugmodel").optimizer
    assert config.swap_optimizer is False
