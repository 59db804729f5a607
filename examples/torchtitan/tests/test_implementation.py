# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every implementation, resumed with every other, natively and swapped."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from _small import OnTheCpu, bits, parts, train
from torch.distributed import checkpoint
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from swap_core import StateDictError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*swap_optimizer"),
]

FLAGS = {
    "for-loop": {"fused": False, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "fused": {"fused": True, "foreach": False},
}
"""As torchtitan sets them."""
SWAPPABLE = {"AdamW": ("for-loop", "fused"), "Adam": ("for-loop",)}


def trainings(name):
    """Kind and implementation of all that there are."""
    native = [("native", each) for each in FLAGS]
    return native + [("swapped", each) for each in SWAPPABLE[name]]


def made(kind, name, implementation, lr=0.01):
    group = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": lr})
    container = OptimizersContainer if kind == "native" else OnTheCpu
    more = {} if kind == "native" else {"swap_optimizer": True, "swap_optimizer_min_numel": 0}
    config = container.Config(param_groups=[group], implementation=implementation, **more)
    model_parts = parts()
    return config.build(model_parts=model_parts), model_parts


def flags(optimizers):
    (found,) = {
        (group["fused"], group["foreach"]) for each in optimizers for group in each.param_groups
    }
    return dict(zip(("fused", "foreach"), found, strict=True))


def resumed(kind, name, implementation, state_dict, flags=None):
    """Two more steps from a state dict, in new parameters."""
    optimizers, model_parts = made(kind, name, implementation)
    optimizers.load_state_dict(copy.deepcopy(state_dict))
    for group in (group for each in optimizers for group in each.param_groups):
        group.update(flags or {})
    train(optimizers, model_parts, 2)
    return optimizers, [bits(part.state_dict()) for part in model_parts]


CASES = [
    (name, *saved, *resumed)
    for name in SWAPPABLE
    for saved, resumed in product(trainings(name), trainings(name))
]


@pytest.mark.parametrize(("name", "writer", "saved", "reader", "own"), CASES)
def test_every_implementation_resumes_from_every_other(name, writer, saved, reader, own):
    optimizers, model_parts = made(writer, name, saved, lr=0.02)
    train(optimizers, model_parts, 3)
    state_dict = optimizers.state_dict()
    found, parameters = resumed(reader, name, own, state_dict)
    # Natively the checkpoint decides. So it does here, unless that cannot swap.
    can = reader == "native" or saved in SWAPPABLE[name]
    assert flags(found) == FLAGS[saved if can else own]
    assert all(group["lr"] == 0.02 for each in found for group in each.param_groups)
    expected, expected_parameters = resumed("native", name, own, state_dict, flags(found))
    assert parameters == expected_parameters
    assert bits(found.state_dict()) == bits(expected.state_dict())


@pytest.mark.parametrize(("name", "saved"), [("AdamW", "foreach"), ("Adam", "fused")])
def test_from_files_and_said_once(name, saved, tmp_path, caplog):
    native, model_parts = made("native", name, saved)
    train(native, model_parts, 3)
    checkpoint.save({"optimizer": native}, checkpoint_id=tmp_path, no_dist=True)
    swapped, _ = made("swapped", name, "for-loop")
    with caplog.at_level("INFO"):
        checkpoint.load({"optimizer": swapped}, checkpoint_id=tmp_path, no_dist=True)
    assert flags(swapped) == FLAGS["for-loop"]
    message = (
        f"the checkpoint says {saved}=True for {name}, which cannot be combined with swapping; "
        f"this training goes on with its own fused=False, foreach=False."
    )
    assert caplog.text.count(message) == 1  # for two model parts
    ours, theirs = swapped.state_dict(), native.state_dict()
    kept = {key for key in ours if not key.endswith((".fused", ".foreach"))}
    assert bits({key: ours[key] for key in kept}) == bits({key: theirs[key] for key in kept})


def test_nothing_is_said_where_nothing_is_replaced(caplog):
    native, _ = made("native", "AdamW", "for-loop")
    swapped, _ = made("swapped", "AdamW", "fused")
    with caplog.at_level("INFO"):
        swapped.load_state_dict(native.state_dict())
    assert "checkpoint" not in caplog.text
    assert flags(swapped) == FLAGS["for-loop"]


def test_a_state_dict_that_is_given_is_not_changed():
    native, _ = made("native", "AdamW", "foreach")
    given = native.state_dict()
    before = bits(given)
    made("swapped", "AdamW", "fused")[0].load_state_dict(given)
    assert bits(given) == before


def test_other_options_that_cannot_swap_are_refused_before_anything_changes():
    native, model_parts = made("native", "AdamW", "for-loop")
    train(native, model_parts, 3)
    state_dict = native.state_dict()
    for key in state_dict:
        if key.startswith("param_groups.two.") and key.endswith(".capturable"):
            state_dict[key] = True
    swapped, _ = made("swapped", "AdamW", "for-loop")
    before = bits(swapped.state_dict())
    message = (
        r"the checkpoint has AdamW with options that cannot be combined with swapping, and .*\. "
        r"Resume with --optimizer\.no-swap-optimizer, or without the states: "
        r"--checkpoint\.exclude-from-loading optimizer\. \(.*capturable=True"
    )
    with pytest.raises(StateDictError, match=message):
        swapped.load_state_dict(state_dict)
    assert bits(swapped.state_dict()) == before


def test_what_is_not_in_a_state_dict_is_torchtitans_matter():
    swapped, _ = made("swapped", "AdamW", "for-loop")
    assert isinstance(swapped.state_dict()["state.one.weight.exp_avg"], torch.Tensor)
    with pytest.raises(KeyError, match="not found in checkpoint"):
        swapped.load_state_dict({})
