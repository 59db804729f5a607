# SPDX-License-Identifier: Apache-2.0
"""Nothing visible is ever freed memory.

Device memory is freed for real here, and to touch freed CPU memory ends a process. So each scene
runs in a process of its own: this file, run as a program, forks one for each. What a scene prints
last is what it did when it died.
"""

from __future__ import annotations

import copy
import io
import itertools
import multiprocessing
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swap_testkit import Tamper
from swap_testkit.torch import CopySchedule, CpuAsDevice, TorchRecordingDevice, assert_same_bits
from swap_torch import SwapOptimizerConfig, swap_optimizer

SHAPES = [(64, 96), (1024,), (7,), (300, 11), (2049,), (64, 64)]
PLANTED = RuntimeError("planted")


class Pair:
    """A native and a swapped optimizer with equal parameters and gradients."""

    def __init__(self, packed: bool, schedule: CopySchedule = CopySchedule.LATEST) -> None:
        self.device = TorchRecordingDevice(CpuAsDevice(schedule=schedule))
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        # One state of six stays: readers meet both kinds.
        self.config = SwapOptimizerConfig(swap_times=3, min_numel=8, packed_swap=packed)
        self.native, self.swapped = (
            torch.optim.AdamW([torch.nn.Parameter(value.clone()) for value in values])
            for _ in range(2)
        )

    def wrap(self) -> None:
        """From now on the second one swaps."""
        swap_optimizer(self.swapped, self.config, device=self.device)

    def step(self, *, fail: bool = False) -> None:
        """Step both, or only the second one, in vain."""
        for optimizer in (self.native, self.swapped):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.full_like(param, 0.25)
        if not fail:
            self.native.step()
            self.swapped.step()
            return
        # Before the first batch is updated.
        self.device.tamper = Tamper("copy_in", 0, PLANTED)
        try:
            self.swapped.step()
        except RuntimeError as error:
            assert error is PLANTED  # noqa: PT017  # runs without pytest
        else:
            raise AssertionError("nothing failed")
        self.device.tamper = None


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested dicts and lists, in order."""
    if isinstance(thing, torch.Tensor):
        yield thing
    for item in thing.values() if isinstance(thing, dict) else thing if _is_list(thing) else ():
        yield from tensors_in(item)


def _is_list(thing: Any) -> bool:
    return isinstance(thing, list | tuple)


def equal(found: Any, expected: Any) -> None:
    """Fail unless both hold the same values."""
    assert all(map(torch.equal, tensors_in(found), tensors_in(expected)))
    assert len(list(tensors_in(found))) == len(list(tensors_in(expected)))


def saved(thing: Any) -> tuple[int, Any]:
    """Bytes of the file that ``torch.save`` writes, and what it loads from it."""
    file = io.BytesIO()
    torch.save(thing, file)
    size = file.tell()
    file.seek(0)
    return size, torch.load(file, weights_only=True)


def read_everything(pair: Pair) -> None:
    """Look at states in every way that comes to mind."""
    native, swapped = pair.native, pair.swapped
    expected = [list(entry.values()) for entry in native.state.values()]
    nbytes = sum(tensor.nbytes for tensor in tensors_in(expected))

    def say(what: str) -> None:
        print(what, flush=True)

    say("iterate")
    assert [list(entry) for _, entry in swapped.state.items()] == [
        list(entry) for entry in native.state.values()
    ]
    values = [list(entry.values()) for entry in swapped.state.values()]
    equal(values, expected)
    say("arithmetic")
    for tensor in tensors_in(values):
        assert torch.isfinite(tensor + tensor.clone()).all()
        tensor.flatten().tolist()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
    say("numpy")
    assert all(tensor.numpy().shape == tensor.shape for tensor in tensors_in(values))
    say("print")
    assert ("tensor" in f"{swapped.state} {swapped.state_dict()}") == bool(expected)
    say("repr")
    assert "swapped" in f"{swapped} {pair.swapped.swap_report()}"
    say("clone")
    equal([tensor.clone() for tensor in tensors_in(values)], expected)
    say("deepcopy")
    equal(list(copy.deepcopy(dict(swapped.state)).values()), list(native.state.values()))
    equal(copy.deepcopy(swapped.state_dict()), native.state_dict())
    say("pickle")
    equal(pickle.loads(pickle.dumps(swapped.state_dict())), native.state_dict())
    equal(list(pickle.loads(pickle.dumps(swapped.state)).values()), list(native.state.values()))
    say("save")
    for thing, like in (
        (swapped.state_dict(), native.state_dict()),
        (list(swapped.state.values()), list(native.state.values())),
    ):
        size, loaded = saved(thing)
        equal(loaded, like)
        # As small as native's own file, so no more than the state.
        assert size <= saved(like)[0] + 64
        assert size <= nbytes + 1000 * len(list(tensors_in(expected))) + 4096
    say("save one")
    for tensor in tensors_in(values):
        assert saved(tensor)[0] <= tensor.nbytes + 4096


def scene_after_wrapping(packed: bool) -> None:
    """States that exist before wrapping."""
    pair = Pair(packed)
    pair.step()
    pair.step()
    pair.wrap()
    read_everything(pair)


def scene_before_the_first_step(packed: bool) -> None:
    """No states."""
    pair = Pair(packed)
    pair.wrap()
    assert not pair.swapped.state
    read_everything(pair)


def scene_between_updates(packed: bool) -> None:
    """Some updates, with and without a look in between."""
    pair = Pair(packed)
    pair.wrap()
    for _ in range(3):
        pair.step()
        pair.step()
        read_everything(pair)
        assert_same_bits(pair.native, pair.swapped)


def scene_after_a_failed_step(packed: bool) -> None:
    """A step that fails before it updates anything."""
    pair = Pair(packed)
    pair.wrap()
    pair.step()
    pair.step(fail=True)
    read_everything(pair)
    pair.step()
    read_everything(pair)
    assert_same_bits(pair.native, pair.swapped)


def scene_copied_optimizer(packed: bool) -> None:
    """Copies of the optimizer as a whole, and of its device, which must have nothing queued."""
    pair = Pair(packed, CopySchedule.EARLIEST)
    pair.wrap()
    pair.step()
    original = pair.swapped
    for copied in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        pair.swapped = copied(original)
        read_everything(pair)


SCENES: dict[str, Callable[[bool], None]] = {
    name.removeprefix("scene_"): value
    for name, value in list(globals().items())
    if name.startswith("scene_")
}
LAYOUTS = ["packed", "per-tensor"]


def main() -> None:
    """Run every scene in a process of its own, forked from one that has imported everything."""
    torch.set_num_threads(1)  # a child would wait for threads that only its parent has
    Pair(packed=True).step()  # optimizers import much when they are first used
    for scene, layout in itertools.product(SCENES, LAYOUTS):
        print(f"--- {scene} {layout}", flush=True)
        child = multiprocessing.get_context("fork").Process(target=run, args=(scene, layout))
        child.start()
        child.join()
        print(f"exit code {child.exitcode}", flush=True)


def run(scene: str, layout: str) -> None:
    """Run one scene."""
    warnings.simplefilter("error")
    SCENES[scene](layout == "packed")


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What each scene printed."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=300,
    )
    parts = [part.partition("\n") for part in done.stdout.split("--- ")]
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str, layout: str, outputs: dict[str, str]) -> None:
    output = outputs[f"{scene} {layout}"]
    assert output.endswith("save one\nexit code 0\n"), output


if __name__ == "__main__":
    main()
