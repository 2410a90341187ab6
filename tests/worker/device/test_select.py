"""The device that a worker takes, and the options that are refused before anything is loaded."""

from typing import Any

import pytest
import torch
from triton import knobs

from configs.load import load_options
from configs.options import Options
from configs.quantization import offered
from worker.device.device import CudaDevice, InterpretedDevice
from worker.device.select import Gpu, check_gpu, gpu_index, select_device
from worker.errors import PermanentError
from worker.process.build import check_cpu_options, check_gpu_options

H200 = Gpu(name="NVIDIA H200", capability=(9, 0))
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
T4 = Gpu(name="Tesla T4", capability=(7, 5))


def options_of(**changes: Any) -> Options:
    return load_options(flags=changes, environ={})


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Triton compile kernels, not interpret them."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)


@pytest.mark.usefixtures("compiled")
class TestDevice:
    def test_auto_is_a_cpu_where_torch_finds_no_gpu(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert select_device(options_of()) is None

    def test_auto_is_a_cpu_beside_a_gpu_of_another_maker(self, monkeypatch: pytest.MonkeyPatch):
        """torch's ROCm builds claim that CUDA is available."""
        _gpus(monkeypatch, 1, H200)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert select_device(options_of()) is None

    def test_cpu_is_a_cpu_whatever_there_is(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert select_device(options_of(device="cpu")) is None

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_a_worker_takes_its_own_gpu(self, device: str, monkeypatch: pytest.MonkeyPatch):
        _gpus(monkeypatch, 4, A100)
        taken: list[int] = []
        monkeypatch.setattr(CudaDevice, "__init__", lambda self, index: taken.append(index))
        options = options_of(device=device, data_parallel_size=4)
        assert isinstance(select_device(options, replica=2), CudaDevice)
        assert taken == [2]

    def test_a_build_without_cuda_is_said_to_be_one(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(PermanentError, match=r"device=cuda: torch .* without CUDA: install .*; device=cpu"):
            select_device(options_of(device="cuda"))

    def test_what_torch_says_of_the_driver_is_passed_on(self, monkeypatch: pytest.MonkeyPatch):
        def fail() -> None:
            raise RuntimeError("Found no NVIDIA driver on your system.")

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", fail)
        with pytest.raises(PermanentError, match=r"finds no GPU \(Found no NVIDIA driver on your system\.\); "):
            select_device(options_of(device="cuda"))

    def test_a_gpu_that_is_too_old_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        _gpus(monkeypatch, 1, T4)
        with pytest.raises(PermanentError, match=r"device=auto: Tesla T4 has compute capability 7\.5.*8\.0 or above"):
            select_device(options_of())


def test_interpreted_kernels_stand_for_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    device = select_device(options_of(device="cuda"))
    assert isinstance(device, InterpretedDevice)
    assert device.torch_device.type == "cpu"
    assert "TRITON_INTERPRET is set" in caplog.text, "without a warning, somebody may benchmark the interpreter"


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int, gpu: Gpu) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {"is_available": True, "init": None, "device_count": count}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpu.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpu.capability)


def test_workers_of_one_host_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch):
    assert [gpu_index(options_of(data_parallel_size=3), 4, replica, 0) for replica in range(3)] == [0, 1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said = r"data_parallel_size=3 needs 3 GPUs.* 2 are visible \(CUDA_VISIBLE_DEVICES=0,1\): use data_parallel_size=2"
    with pytest.raises(PermanentError, match=said):
        gpu_index(options_of(data_parallel_size=3), 2, 0, 0)


def test_so_have_ranks_that_share_layers():
    options = options_of(data_parallel_size=2, tensor_parallel_size=2)
    assert [gpu_index(options, 4, replica, rank) for replica in range(2) for rank in range(2)] == [0, 1, 2, 3]
    with pytest.raises(PermanentError, match=r"with tensor_parallel_size=2 needs 4 GPUs.* data_parallel_size=1 or"):
        gpu_index(options, 3, 0, 0)
    with pytest.raises(PermanentError, match="use tensor_parallel_size=1 or less, or device=cpu"):
        gpu_index(options, 1, 0, 0)


def test_workers_of_several_hosts_begin_anew_on_each():
    """Otherwise the second host's workers would ask for GPUs that only the first host has."""
    addresses = [f"tcp://10.0.0.{host}:{5555 + 2 * i}" for host in (1, 2) for i in range(2)]
    options = options_of(data_parallel_size=4, step_addresses=addresses, curve_dir="keys")
    assert [gpu_index(options, 2, replica, 0) for replica in range(4)] == [0, 1, 0, 1]


def test_fp8_needs_a_gpu_that_multiplies_it():
    check_gpu(options_of(quantization="fp8"), H200)
    with pytest.raises(PermanentError, match=r"quantization=fp8: NVIDIA A100.* 8\.0.* need 8\.9 or above .*=none"):
        check_gpu(options_of(quantization="fp8"), A100)
    # An e4m3 cache works on every GPU: the kernels only convert when they read and write it.
    check_gpu(options_of(kv_cache_dtype="fp8"), A100)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "fp8"}, "quantization=fp8 is for GPUs only: use int8, int4 or none"),
        ({"kv_cache_dtype": "fp8", "dtype": "float32"}, "kv_cache_dtype=fp8 with dtype=float32"),
        ({"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "kv_cache_dtype=bfloat16 with dtype=float32"),
    ],
)
def test_what_only_gpus_do_is_refused_on_cpus(changes: dict[str, Any], said: str):
    with pytest.raises(PermanentError, match=said):
        check_cpu_options(options_of(**changes))
    check_gpu_options(options_of(**changes))


def test_what_only_cpus_do_is_refused_on_gpus():
    with pytest.raises(PermanentError, match="quantization=int8 is for CPUs only: use fp8, int4 or none"):
        check_gpu_options(options_of(quantization="int8"))
    check_cpu_options(options_of(quantization="int8"))


@pytest.mark.parametrize("quantization", offered(on_gpu=True))
def test_every_quantization_that_gpus_compute_is_taken_there(quantization: str):
    """The check of options and the loader must not disagree, as they did about int4."""
    check_gpu_options(options_of(quantization=quantization))
    check_gpu(options_of(quantization=quantization), H200)


def test_options_without_effect_are_named(caplog: pytest.LogCaptureFixture):
    check_cpu_options(options_of(gpu_memory_utilization=0.5, enforce_eager=True, batch_invariant=True))
    check_gpu_options(options_of(kv_cache_memory=2.5))
    assert [record.message for record in caplog.records] == [
        "gpu_memory_utilization=0.5 has no effect on CPUs: kv_cache_memory bounds the KV cache there",
        "enforce_eager=True has no effect on CPUs: there are no CUDA graphs",
        "kv_cache_memory=2.5 has no effect on GPUs: the KV cache takes what gpu_memory_utilization leaves",
    ]


def test_defaults_fit_everywhere_without_a_word(caplog: pytest.LogCaptureFixture):
    check_cpu_options(options_of())
    check_gpu_options(options_of())
    check_gpu(options_of(), A100)
    assert not caplog.records
