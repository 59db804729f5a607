# SPDX-License-Identifier: Apache-2.0
"""What downstream projects call on their own models."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from swap_core import SwapOptimizerConfig
from swap_testkit.alignment import Alignment
from swap_testkit.array import Tolerance

if TYPE_CHECKING:
    from swap_testkit.mindspore.align import Builder as MindSporeBuilder
    from swap_testkit.torch.run import Builder as TorchBuilder

    Builder: TypeAlias = TorchBuilder | MindSporeBuilder

__all__ = ["align", "assert_aligned"]


def align(
    builder: Builder | str,
    *,
    steps: int = 8,
    config: SwapOptimizerConfig | None = None,
    seed: int = 0,
    parallel: str = "none",
    nproc: int = 1,
    device: str = "cpu",
    tolerance: Tolerance | None = None,
    timeout: float = 600.0,
    framework: str = "torch",
) -> Alignment:
    """Train the same job natively and swapped, and compare everything.

    Losses of each step, and at the end every parameter, state and counter, bit by bit; bytes of
    states on device and host; times. If something differs, both trainings run once more with every
    tensor fingerprinted after every step, so that the result says where it began.

    Args:
        builder: From a seed to a :class:`swap_testkit.torch.Job` or
            :class:`swap_testkit.mindspore.Job`: a function of a module, or its name,
            ``package.module:function``. Called for each run, on each rank.
        steps: How many, >= 1.
        config: How to swap; None: the default.
        seed: Given to the builder, and to the framework's generator before.
        parallel: ``none``, ``ddp``, ``fsdp`` or ``hsdp``: how the kit makes the model parallel.
            With ``none`` and several processes, the builder does that itself.
        nproc: Processes on this machine.
        device: ``cpu`` (CPU tensors play the device), ``sim`` (the simulated accelerator; a race
            raises), or an accelerator's type such as ``npu``.
        tolerance: None: exact. A tolerance is named in the result.
        timeout: Seconds after which the processes are killed.
        framework: ``torch`` or ``mindspore``, which trains on this process only.

    Returns:
        The result; :meth:`Alignment.explain` tells it.

    Raises:
        ValueError: an argument is not accepted.
        swap_testkit.torch.RankFailedError: a process raised, with its traceback.
    """
    if type(steps) is not int or steps < 1:
        raise ValueError(f"align: steps={steps!r} is not accepted; give an integer >= 1.")
    if type(nproc) is not int or nproc < 1:
        raise ValueError(f"align: nproc={nproc!r} is not accepted; give an integer >= 1.")
    if framework not in ("torch", "mindspore"):
        raise ValueError(
            f"align: framework={framework!r} is not accepted; give 'torch' or 'mindspore'."
        )
    configs = [config or SwapOptimizerConfig()]
    tolerance = tolerance or Tolerance()
    if framework == "mindspore":
        from swap_testkit.mindspore.align import align_job as align_mindspore_job

        if parallel != "none" or nproc != 1:
            raise ValueError(
                f"align: parallel={parallel!r} with nproc={nproc} is not accepted with "
                f"framework='mindspore', which trains on this process only; leave them out."
            )
        (alignment,) = align_mindspore_job(
            cast("MindSporeBuilder | str", builder),
            steps=steps,
            configs=configs,
            seed=seed,
            device=device,
            tolerance=tolerance,
        )
        return alignment

    from swap_testkit.torch.parallel import Parallel
    from swap_testkit.torch.run import align_job

    kinds = [kind.value for kind in Parallel]
    if parallel not in kinds:
        raise ValueError(f"align: parallel={parallel!r} is not accepted; give one of {kinds}.")
    (alignment,) = align_job(
        cast("TorchBuilder | str", builder),
        steps=steps,
        configs=configs,
        seed=seed,
        parallel=Parallel(parallel),
        nproc=nproc,
        device=device,
        tolerance=tolerance,
        timeout=timeout,
    )
    return alignment


def assert_aligned(
    builder: Builder | str,
    *,
    steps: int = 8,
    config: SwapOptimizerConfig | None = None,
    seed: int = 0,
    parallel: str = "none",
    nproc: int = 1,
    device: str = "cpu",
    tolerance: Tolerance | None = None,
    timeout: float = 600.0,
    framework: str = "torch",
) -> Alignment:
    """:func:`align`, and fail unless everything agrees.

    Raises:
        AssertionError: something differs; the message says what, from which step on, and how far.
    """
    alignment = align(
        builder,
        steps=steps,
        config=config,
        seed=seed,
        parallel=parallel,
        nproc=nproc,
        device=device,
        tolerance=tolerance,
        timeout=timeout,
        framework=framework,
    )
    if not alignment.aligned:
        raise AssertionError(alignment.explain())
    return alignment
