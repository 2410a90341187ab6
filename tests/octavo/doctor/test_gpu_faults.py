"""Faults of GPUs and drivers are named by `octavo doctor`; nvidia-smi is played by a script."""

import os
from pathlib import Path

import pytest

from octavo.doctor.machine import State
from octavo.doctor.probe import GpuFacts, TorchFacts
from octavo.doctor.subjects import memory
from octavo.doctor.subjects.gpu import check_driver, check_gpu
from tests.support.doctor import GIB, MODEL, executable, machine, only


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lists an H100 of which 8 GiB are free, with a driver of CUDA 12."""
    executable(tmp_path / "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81920, 8192, 550.54.15, 9.0'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


H100 = GpuFacts(name="NVIDIA H100 80GB HBM3", capability="9.0")


@pytest.mark.usefixtures("nvidia_smi")
def test_a_gpu_that_pytorch_cannot_use() -> None:
    cpu_build = TorchFacts()
    assert "GPU=1 make install" in only(check_gpu(machine(cpu_build)), State.NOTE).advice
    assert "PyTorch is a CPU build" in only(check_gpu(machine(cpu_build, device="cuda")), State.PROBLEM).found
    no_driver = TorchFacts(cuda="13.0", gpu_error="The NVIDIA driver on your system is too old")
    assert "driver on your system is too old" in only(check_gpu(machine(no_driver)), State.PROBLEM).found
    works = only(check_gpu(machine(TorchFacts(cuda="12.8", gpus=(H100,)))), State.OK)
    assert works.found == "1 x NVIDIA H100 80GB HBM3 (80.0 GiB), 8.0 GiB free; PyTorch sees 1"


@pytest.mark.usefixtures("nvidia_smi")
def test_an_old_driver() -> None:
    found = only(check_driver(machine(TorchFacts(cuda="13.0"))), State.PROBLEM)
    assert found.found == "550.54.15 is too old for PyTorch's CUDA 13.0, which needs 580 or newer"
    only(check_driver(machine(TorchFacts(cuda="12.8"))), State.OK)


@pytest.mark.usefixtures("nvidia_smi")
def test_a_gpu_that_others_have_filled() -> None:
    big = MODEL.model_copy(update={"weight_bytes": 16 * GIB})
    checks = memory.check_memory(machine(TorchFacts(cuda="12.8", gpus=(H100,)), big, device="cuda"))
    found = next(check for check in checks if check.subject == "GPU memory")
    assert found.state is State.PROBLEM
    assert "weights take 16.0 GiB of the 0 MiB that gpu_memory_utilization=0.9" in found.found


def test_no_gpu_and_a_broken_driver(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(nvidia_smi, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert "version mismatch" in only(check_gpu(machine()), State.PROBLEM).found
    monkeypatch.setenv("PATH", str(nvidia_smi.parent / "empty"))
    assert "pass the GPU in" in only(check_gpu(machine(device="cuda")), State.PROBLEM).advice
    only(check_gpu(machine()), State.OK)
