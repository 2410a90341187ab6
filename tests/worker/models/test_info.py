"""Fingerprints: which models count as replicas of each other, and which must not. Defaults of sampling."""

from typing import Any

import pytest
import torch

from configs.options import Options
from protos import inference_pb2
from worker.model_config import SamplingDefaults
from worker.models.info import cpu_kernels, default_sampling, fingerprint, gpu_kernels


def of(kernels: str, *, tensor_size: int = 1, whole_experts: bool = False) -> str:
    return fingerprint(
        weights_digest="abc",
        dtype="bfloat16",
        quantization="none",
        kernels=kernels,
        tensor_size=tensor_size,
        whole_experts=whole_experts,
    )


def test_another_gpu_is_another_replica():
    """It uses other tiles and GEMMs for the same path, so a stream that continues there would not be exact."""
    h100, h200 = (gpu_kernels("triton-sm90-bfloat16", name) for name in ("NVIDIA H100", "NVIDIA H200"))
    assert of(h100) == of(gpu_kernels("triton-sm90-bfloat16", "NVIDIA H100"))
    assert len({of(h100), of(h200), of(gpu_kernels("triton-sm90-bfloat16-kv-float8_e4m3fn", "NVIDIA H100"))}) == 3


def test_threads_of_the_host_decide_nothing_on_a_gpu():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        gpu, cpu = gpu_kernels("triton-sm90-bfloat16", "NVIDIA H200"), cpu_kernels("cpu-onednn-float32")
        torch.set_num_threads(2)
        assert gpu_kernels("triton-sm90-bfloat16", "NVIDIA H200") == gpu
        assert cpu_kernels("cpu-onednn-float32") != cpu
    finally:
        torch.set_num_threads(threads)


def test_ranks_that_have_parts_of_experts_add_up_other_numbers_than_those_that_have_whole_ones():
    sizes = {of("cpu", tensor_size=size, whole_experts=whole) for size in (2, 4) for whole in (False, True)}
    assert len({of("cpu"), *sizes}) == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.5, "top_k": 7}),
        ({"generation_config": "vllm"}, {}),
        ({"override_generation_config": {"top_k": 0, "top_p": 0.9}}, {"temperature": 0.5, "top_k": 0, "top_p": 0.9}),
        ({"generation_config": "vllm", "override_generation_config": '{"min_p": 0.1}'}, {"min_p": 0.1}),
    ],
)
def test_defaults_of_sampling_come_from_options_before_the_models_files(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    of_model = SamplingDefaults(temperature=0.5, top_k=7)
    assert default_sampling(Options(**options), of_model) == inference_pb2.SamplingParams(**expected)
