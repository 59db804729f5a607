# SPDX-License-Identifier: Apache-2.0
"""The device type, its module, and one per process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from swap_testkit.torch import simulator

DEVICE = "simnpu"


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )


def test_it_is_torchs_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert str(torch.accelerator.current_accelerator()) == DEVICE
    assert torch.accelerator.device_count() == 2
    assert simulator.enabled_name() == DEVICE
    tensor = torch.ones(2, device=DEVICE)
    assert (tensor.device.type, tensor.device.index) == (DEVICE, 0)
    assert tensor.is_simnpu  # type: ignore[attr-defined]
    assert torch.ones(2).simnpu(1).device.index == 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="there is no device 2"):
        torch.ones(2, device=f"{DEVICE}:2")


def test_the_module_has_what_trainers_call() -> None:
    module = torch.get_device_module(DEVICE)
    assert module is torch.simnpu  # type: ignore[attr-defined]
    for name in module.__all__:
        assert getattr(module, name).__doc__
    assert module.is_available()
    assert module.is_initialized()
    assert not module._is_in_bad_fork()
    assert module.get_device_name() == "Simulated accelerator (simnpu)"
    assert module.get_device_properties().total_memory == 64 << 30
    simulator.set_memory_limit(1 << 20)
    assert module.get_device_properties().total_memory == module.mem_get_info()[1] == 1 << 20
    with module.device(1):
        assert module.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.empty(1, device=DEVICE).device.index == 1
    assert module.current_device() == 0
    stream = module.Stream()
    with module.stream(stream):
        assert module.current_stream() == stream
    with module.stream(None):
        assert module.current_stream() == module.default_stream()
    event = module.Event(enable_timing=True)
    event.record(stream)
    module.synchronize()
    assert event.query()
    module.reset_accumulated_memory_stats()
    assert module.max_memory_reserved() >= module.memory_reserved()


def test_code_for_another_accelerator_runs_under_its_name() -> None:
    done = run(
        "import torch\n"
        "from swap_testkit.torch import simulator\n"
        "simulator.enable('npu', devices=1, memory_limit=2**20)\n"
        "torch.npu.set_device(0)\n"
        "x = torch.ones(128, pin_memory=True).npu(non_blocking=True)\n"
        "side = torch.npu.Stream()\n"
        "side.wait_stream(torch.npu.current_stream())\n"
        "with torch.npu.stream(side):\n"
        "    y = x * 2\n"
        "torch.npu.current_stream().wait_stream(side)\n"
        "assert y.is_npu and y.device == torch.device('npu', 0)\n"
        "assert torch.npu.memory_allocated() == 1024\n"
        "torch.npu.manual_seed_all(1)\n"
        "torch.npu.synchronize()\n"
        "try:\n"
        "    torch.empty(2**20, device='npu')\n"
        "except torch.OutOfMemoryError:\n"
        "    print(y.sum().item(), simulator.races())\n"
    )
    assert done.stdout == "256.0 []\n", done.stderr
    assert done.returncode == 0


def test_a_second_backend_is_refused() -> None:
    done = run(
        "import torch\n"
        "torch.utils.rename_privateuse1_backend('other')\n"
        "from swap_testkit.torch import simulator\n"
        "simulator.enable()\n"
    )
    assert done.returncode == 1
    assert "already has the accelerator 'other'" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr


def test_kernels_without_a_name_count_as_a_backend_too() -> None:
    done = run(
        "import torch\n"
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('empty.memory_format', lambda *a, **k: None, 'PrivateUse1')\n"
        "from swap_testkit.torch import simulator\n"
        "simulator.enable()\n"
    )
    assert "already has the accelerator 'privateuseone'" in done.stderr


def test_enabling_again_changes_settings_only() -> None:
    simulator.enable(DEVICE, devices=2, memory_limit=1 << 20)
    assert torch.accelerator.get_memory_info()[1] == 1 << 20
    simulator.enable(DEVICE, devices=2)
    assert torch.accelerator.get_memory_info()[1] == 64 << 30
    with pytest.raises(RuntimeError, match="already enabled as 2 devices of type 'simnpu'"):
        simulator.enable("npu", devices=2)


@pytest.mark.parametrize("name", ["Npu", "my-npu", ""])
def test_names_that_are_no_device_types(name: str) -> None:
    with pytest.raises(ValueError, match="give a lower-case identifier"):
        simulator.enable(name)


@pytest.mark.parametrize("devices", [0, 65, True, 1.0])
def test_numbers_of_devices_that_are_none(devices: int) -> None:
    with pytest.raises(ValueError, match="give an integer from 1 to 64"):
        simulator.enable(DEVICE, devices=devices)


def test_a_name_of_torchs_own_is_refused() -> None:
    done = run("from swap_testkit.torch import simulator\nsimulator.enable('optim')\n")
    assert "torch.optim exists" in done.stderr


def test_controls_need_the_simulator() -> None:
    done = run("from swap_testkit.torch import simulator\nsimulator.races()\n")
    assert "not enabled; call simulator.enable() first" in done.stderr


@pytest.mark.parametrize("schedule", ["THREADS", "LATEST"])
def test_a_process_ends_cleanly_with_work_in_flight(schedule: str) -> None:
    done = run(
        "import torch\n"
        "from swap_testkit.torch import simulator\n"
        f"simulator.enable(schedule=simulator.Schedule.{schedule})\n"
        "side = torch.Stream(device='simnpu')\n"
        "x = torch.ones(10000, device='simnpu')\n"
        "h = [torch.empty(10000, pin_memory=True) for _ in range(50)]\n"
        "side.wait_stream(torch.accelerator.current_stream())\n"
        "with side:\n"
        "    [t.copy_(x, non_blocking=True) for t in h]\n"
        "x.record_stream(side)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
