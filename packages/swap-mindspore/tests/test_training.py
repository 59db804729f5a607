# SPDX-License-Identifier: Apache-2.0
"""A swapped optimizer where MindSpore's own training code expects a native one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.amp import DynamicLossScaler, all_finite
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint

from swap_mindspore import HostDevice, SwapOptimizerConfig, swap_optimizer


class Net(nn.Cell):
    """Two layers with a norm between, whose parameters are named beta and gamma."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.up = nn.Dense(6, 16)
        self.norm = nn.LayerNorm((16,))
        self.down = nn.Dense(16, 3)
        values = np.random.default_rng(0)
        for param in self.get_parameters():
            drawn = values.standard_normal(param.shape).astype(np.float32) * 0.3
            param.set_data(Tensor(drawn))
        if recompute:
            self.up.recompute()

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.relu(self.norm(self.up(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    values = np.random.default_rng(step)
    return (
        Tensor(values.standard_normal((8, 6)).astype(np.float32)),
        Tensor(values.standard_normal((8, 3)).astype(np.float32)),
    )


def adam(net: nn.Cell) -> nn.Optimizer:
    return nn.Adam(net.trainable_params(), 0.01, weight_decay=0.01)


def wrap(optimizer: nn.Optimizer) -> nn.Optimizer:
    config = SwapOptimizerConfig(min_numel=0, swap_times=3)
    return swap_optimizer(optimizer, config, device=HostDevice(poison=True))


def compare(kit, train: Callable[[Callable[[nn.Optimizer], nn.Optimizer]], Any]) -> None:
    """``train`` twice, natively and with the wrap; it returns the optimizer and the losses."""
    native, losses = train(lambda optimizer: optimizer)
    swapped, others = train(wrap)
    assert [float(loss.asnumpy()) for loss in others] == [float(x.asnumpy()) for x in losses]
    assert kit.bits_of(swapped) == kit.bits_of(native)
    assert kit.device_bytes(swapped) == 0
    assert swapped.swap_report().ledger.updates == native.global_step.asnumpy()[0] > 0


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_train_one_step_cell(kit, wrapped_first) -> None:
    def train(wrapper):
        net = Net()
        optimizer = adam(net)
        if wrapped_first:
            optimizer = wrapper(optimizer)
        step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        if not wrapped_first:
            wrapper(optimizer)
        step.set_train()
        return optimizer, [step(*batch(i)) for i in range(3)]

    compare(kit, train)


class Losses(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.seen.append(run_context.original_args().net_outputs)


def test_model_trains_and_its_checkpoints_are_natives(kit, tmp_path) -> None:
    rows = [np.stack([batch(i)[side].asnumpy()[0] for i in range(12)]) for side in (0, 1)]

    def train(wrapper):
        net = Net()
        optimizer = wrapper(adam(net))
        name = type(optimizer).__mro__[1].__name__
        losses = Losses()
        config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=5)
        saver = ModelCheckpoint(name, str(tmp_path), config)
        data = NumpySlicesDataset(tuple(rows), shuffle=False).batch(4)
        model = Model(net, nn.MSELoss(), optimizer)
        model.train(2, data, callbacks=[losses, saver], dataset_sink_mode=False)
        return optimizer, losses.seen

    compare(kit, train)
    swapped, native = (
        sorted(tmp_path.glob(f"{name}-*.ckpt")) for name in ("MindSporeSwapOptimizer", "Optimizer")
    )
    assert len(swapped) == len(native) >= 3
    for one, other in zip(swapped, native, strict=True):
        ours, theirs = (ms.load_checkpoint(str(path)) for path in (one, other))
        assert any("moment2" in name for name in ours)
        assert list(ours) == list(theirs)
        for name, value in ours.items():
            assert value.asnumpy().tobytes() == theirs[name].asnumpy().tobytes()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_value_and_grad(kit, recompute, compiled) -> None:
    def train(wrapper):
        net = Net(recompute=recompute)
        optimizer = wrapper(adam(net))
        loss_of = nn.MSELoss()

        def forward(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(net(x), y)

        gradient = ms.value_and_grad(forward, None, optimizer.parameters)
        if compiled:  # forward and backward may be; the optimizer runs eagerly
            gradient = ms.jit(gradient)
        losses = []
        for i in range(3):
            loss, grads = gradient(*batch(i))
            optimizer(grads)
            losses.append(loss)
        return optimizer, losses

    compare(kit, train)


def test_accumulation_clipping_and_loss_scaling(kit) -> None:
    def train(wrapper):
        net = Net()
        optimizer = wrapper(adam(net))
        loss_of = nn.MSELoss()
        scaler = DynamicLossScaler(scale_value=2.0**10, scale_factor=2, scale_window=2)

        def forward(x: Tensor, y: Tensor) -> Tensor:
            return scaler.scale(loss_of(net(x), y))

        gradient = ms.value_and_grad(forward, None, optimizer.parameters)
        losses = []
        for i in range(4):
            loss, total = gradient(*batch(2 * i))
            _, more = gradient(*batch(2 * i + 1))
            if i == 1:  # an overflow: the update is left out
                total = tuple(g * float("inf") for g in total)
            grads = scaler.unscale(tuple(a + b for a, b in zip(total, more, strict=True)))
            finite = all_finite(grads)
            scaler.adjust(finite)
            if finite:
                optimizer(ops.clip_by_global_norm(grads, 0.5))
            losses.append(loss)
        return optimizer, losses

    compare(kit, train)


def test_attributes_in_both_directions(kit) -> None:
    pair = kit.make_twins(nn.Adam)
    assert isinstance(pair.swapped, nn.Adam)
    assert type(pair.swapped).__name__ == "Adam"
    for optimizer in (pair.native, pair.swapped):
        optimizer.global_step = Tensor([7], ms.int32)
        optimizer.learning_rate.set_data(Tensor(0.5, ms.float32))
        optimizer.note = "mine"
        assert optimizer.note == "mine"
        assert optimizer.get_lr_parameter(optimizer.parameters[0]).asnumpy() == 0.5
        assert [cell.cls_name for cell in optimizer.cells()] == []
    pair.step(2)
    assert pair.swapped.global_step.asnumpy()[0] == 9


def test_hooks_of_the_cell_run_once_per_update(kit) -> None:
    pair = kit.make_twins(nn.Adam)
    seen: list[str] = []
    pair.swapped.register_forward_pre_hook(lambda cell, inputs: seen.append("before"))
    pair.swapped.register_forward_hook(lambda cell, inputs, output: seen.append("after"))
    pair.step(2)
    assert seen == ["before", "after"] * 2
