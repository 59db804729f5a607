# SPDX-License-Identifier: Apache-2.0
"""torch's own kernels for Adam, called directly.

:func:`torch.optim.adam.adam` sorts its lists by device and dtype and reads and advances counters
one by one, in every call. A plan knows that the lists of a batch are of one kind, and has its
counters in a row; so it can call the same kernels in the same order with the same numbers.

Whether they are the same on this version of torch and on this device is not believed but tried:
:func:`agrees` runs both on some numbers, once, before a direct kernel is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch.optim.adam import adam

__all__ = ["AdamLists", "AdamNumbers", "AdamOptions", "agrees", "direct_adam"]


_ONE = torch.ones((), device="cpu")
"""A number would become a tensor in each call, which takes longer than to add it."""


class AdamLists(NamedTuple):
    """What is updated, and with what; lists of equal length, tensors of one device and dtype."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    max_exp_avg_sqs: list[torch.Tensor]
    """Empty without AMSGrad."""
    steps: list[torch.Tensor]
    row: torch.Tensor | None
    """One tensor over ``steps``, if they lie in a row."""


class AdamNumbers(NamedTuple):
    """What it is updated by; Python numbers, named as the functional and the kernels do."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamOptions(NamedTuple):
    """What decides which kernels run."""

    fused: bool
    foreach: bool
    """Neither: a kernel for each operation and parameter."""
    amsgrad: bool
    maximize: bool
    decays: bool
    """Whether the weight decay is not zero."""
    decoupled: bool


def direct_adam(lists: AdamLists, options: AdamOptions, numbers: AdamNumbers) -> None:
    """Update ``lists.params`` in place on the current stream.

    Args:
        lists: As for :func:`torch.optim.adam.adam`; real numbers, gradients not kept.
        options: ``fused``, ``foreach`` or neither.
        numbers: As they are now.
    """
    if options.fused:
        _advance(lists)
        kernel = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
        kernel(
            *lists[:6],
            amsgrad=options.amsgrad,
            maximize=options.maximize,
            **numbers._asdict(),
        )
    elif options.foreach:
        _foreach_adam(lists, options, numbers)
    else:
        _for_loop_adam(lists, options, numbers)


def _advance(lists: AdamLists) -> None:
    if lists.row is not None:
        lists.row.add_(_ONE)
    else:
        torch._foreach_add_(lists.steps, 1)


def _foreach_adam(lists: AdamLists, options: AdamOptions, numbers: AdamNumbers) -> None:
    """The kernels of ``_multi_tensor_adam``, without ``capturable``."""
    params, grads, firsts, seconds = lists[:4]
    lr, beta1, beta2, eps, weight_decay = numbers
    if options.maximize:
        grads = list(torch._foreach_neg(grads))
    _advance(lists)
    if options.decays and options.decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    elif options.decays and options.maximize:
        torch._foreach_add_(grads, params, alpha=weight_decay)
    elif options.decays:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
    del grads  # Memory of the size of the batch.
    steps = _values(lists)
    sizes, roots = _corrections(steps, lr, beta1, beta2)
    if options.amsgrad:
        torch._foreach_maximum_(lists.max_exp_avg_sqs, seconds)
        seconds = lists.max_exp_avg_sqs
    denominators = torch._foreach_sqrt(seconds)
    torch._foreach_div_(denominators, roots)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, firsts, denominators, sizes)


def _for_loop_adam(lists: AdamLists, options: AdamOptions, numbers: AdamNumbers) -> None:
    """The kernels of ``_single_tensor_adam``, without ``capturable`` and ``differentiable``.

    There the quotient is a new tensor; here the root is divided in place, with the same bits. A
    parameter that fails leaves those after it as they were.
    """
    _advance(lists)
    params, grads, firsts, seconds = lists[:4]
    lr, beta1, beta2, eps, weight_decay = numbers
    maxima = lists.max_exp_avg_sqs or seconds
    begun = 0
    try:
        sizes, roots = _corrections(_values(lists), lr, beta1, beta2)
        for param, grad, first, second, maximum, size, root in zip(
            params, grads, firsts, seconds, maxima, sizes, roots, strict=True
        ):
            begun += 1
            if options.maximize:
                grad = -grad  # a new tensor
            if options.decays and options.decoupled:
                param.mul_(1 - lr * weight_decay)
            elif options.decays:
                grad = grad.add(param, alpha=weight_decay)
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            if options.amsgrad:
                torch.maximum(maximum, second, out=maximum)
            param.addcdiv_(first, maximum.sqrt().div_(root).add_(eps), value=size)
    except BaseException:
        for step in lists.steps[begun:]:
            step.sub_(1)
        raise


def _values(lists: AdamLists) -> Sequence[float]:
    if lists.row is not None:
        values: list[float] = lists.row.tolist()
        return values
    return [step.item() for step in lists.steps]


def _corrections(
    steps: Sequence[float], lr: float, beta1: float, beta2: float
) -> tuple[list[float], list[float]]:
    """Step sizes, and roots of the second bias corrections; each number of steps computed once."""
    known = {step: ((lr / (1 - beta1**step)) * -1, (1 - beta2**step) ** 0.5) for step in set(steps)}
    pairs = [known[step] for step in steps]
    return [size for size, _ in pairs], [root for _, root in pairs]


@cache
def agrees(options: AdamOptions, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether :func:`direct_adam` gives the bits of torch's functional, by trying both.

    Blocks the host until the device is done; some kilobytes of device memory for that time.

    Raises:
        torch.OutOfMemoryError: there is no room for them.
    """
    try:
        return all(_agrees(options, device, dtype, flat=flat) for flat in (False, True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # The functional is going to tell what is wrong with this device or dtype.
        return False


def _agrees(options: AdamOptions, device: torch.device, dtype: torch.dtype, *, flat: bool) -> bool:
    numbers = AdamNumbers(0.01, 0.9, 0.99, 1e-6, 0.03 if options.decays else 0.0)
    mine, native = (_examples(options, device, dtype, flat=flat) for _ in range(2))
    for _ in range(2):
        direct_adam(mine, options, numbers)
        adam(
            *native[:6],
            foreach=options.foreach,
            fused=options.fused,
            amsgrad=options.amsgrad,
            maximize=options.maximize,
            decoupled_weight_decay=options.decoupled,
            **numbers._asdict(),
        )
    pairs = zip(chain(*mine[:6]), chain(*native[:6]), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _examples(
    options: AdamOptions, device: torch.device, dtype: torch.dtype, *, flat: bool
) -> AdamLists:
    """Some numbers of every sign, and counters that differ."""

    def tensors(shift: float) -> list[torch.Tensor]:
        numbers = torch.arange(1, 102, device=device).sub(shift).div(7).to(dtype)
        return [numbers[:2].clone(), numbers[2:].clone()]

    row = torch.tensor([3.0, 8.0], device=device if options.fused else "cpu")
    # Some above the second moments, some below.
    maxima = [each.flip(0) for each in tensors(-0.5)] if options.amsgrad else []
    steps = list(row.unbind())
    lists = tensors(3.2), tensors(2.4), tensors(4.1), tensors(0), maxima, steps
    return AdamLists(*lists, row if flat else None)
