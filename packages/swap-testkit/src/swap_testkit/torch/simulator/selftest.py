# SPDX-License-Identifier: Apache-2.0
"""A short check that the simulated accelerator works here.

``python -m swap_testkit simulator selftest`` runs it. It needs no test runner, so any environment
can run it; the kit's own tests check far more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from swap_testkit.torch.simulator import control, watch
from swap_testkit.torch.simulator.settings import Schedule

__all__ = ["CHECKS", "selftest"]

_DEVICE = "simnpu"


def selftest() -> Iterator[tuple[str, str | None]]:
    """Run all checks; gives each one's name, and what is wrong or None."""
    torch.set_num_threads(1)
    control.enable(_DEVICE, devices=2)
    for name, check in CHECKS.items():
        watch.reset()
        problem = None
        try:
            check()
            _expect(not watch.races(), "the checker reported a race")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            problem = f"{type(error).__name__}: {error}"
        finally:
            control.set_schedule(Schedule.EARLIEST)
            control.set_memory_limit(None)
        yield name, problem


def _expect(right: bool, words: str) -> None:
    if not right:
        raise AssertionError(words)


def _train(device: str, *, fused: bool, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(4, 8, generator=generator).to(device)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().cpu() for param in model.parameters()]


def _training_is_that_of_the_cpu() -> None:
    for fused in (False, True):
        expected = _train("cpu", fused=fused)
        for schedule in Schedule:
            control.set_schedule(schedule, seed=1)
            for ours, theirs in zip(_train(_DEVICE, fused=fused), expected, strict=True):
                _expect(torch.allclose(ours, theirs, atol=1e-6), f"{schedule} differs")


def _a_missing_wait_is_found() -> None:
    side = torch.Stream(device=_DEVICE)
    values = torch.zeros(8, device=_DEVICE)
    host = torch.zeros(8).pin_memory()
    with side:
        host.copy_(values, non_blocking=True)
    _expect(len(watch.races()) == 1, "a missing wait of a stream was not reported")
    host.add_(1)
    _expect(len(watch.races()) == 1, "a missing wait of the host was not reported")


def _memory_is_counted() -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(1000, dtype=torch.uint8, device=_DEVICE)
    _expect(torch.accelerator.memory_allocated() - before == 1024, "wrong number of bytes")
    _expect(bool(torch.empty(4, device=_DEVICE).isnan().all()), "memory is not poisoned")
    control.set_memory_limit(before + 2048)
    try:
        torch.empty(4096, device=_DEVICE)
    except torch.OutOfMemoryError:
        pass
    else:
        _expect(False, "the limit was exceeded")
    tensor.untyped_storage().resize_(0)
    try:
        tensor.add_(1)
    except RuntimeError:
        pass
    else:
        _expect(False, "freed memory was used")


def _errors_are_late() -> None:
    control.set_schedule(Schedule.LATEST)
    index = torch.tensor([9]).to(_DEVICE)
    torch.zeros(3, 2, device=_DEVICE).index_select(0, index)
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        _expect("index_select" in str(error), f"another error: {error}")
    else:
        _expect(False, "an error was lost")


def _random_numbers_repeat() -> None:
    torch.manual_seed(5)
    first = torch.randn(10, device=_DEVICE).cpu()
    torch.manual_seed(5)
    _expect(torch.equal(first, torch.randn(10, device=_DEVICE).cpu()), "other numbers")


CHECKS: dict[str, Callable[[], None]] = {
    "training is that of the CPU, in every schedule": _training_is_that_of_the_cpu,
    "a missing wait is found": _a_missing_wait_is_found,
    "memory is counted, limited, poisoned": _memory_is_counted,
    "errors are late": _errors_are_late,
    "random numbers repeat": _random_numbers_repeat,
}
"""Checks, by what they show."""
