"""Names everything that decides a replica's numbers: replicas of one name continue each other's outputs exactly."""

import hashlib
from importlib.metadata import version

import torch

from runtime.version import octavo_version


def cpu_kernels(path: str) -> str:
    """Which kernels compute here, as far as their results may differ: the model's own, by the name of its compute path,
    the vector width, and the threads a sum may be split over."""
    return f"{path}-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}"


def gpu_kernels(path: str, gpu: str) -> str:
    """The same for a GPU, by its name: tiles are chosen by the number of its SMs, Triton compiles the kernels, and
    libraries of torch's CUDA multiply."""
    return f"{path}-{gpu}-triton-{version('triton')}-cuda-{torch.version.cuda}"


def fingerprint(
    *,
    weights_digest: str,
    dtype: str,
    quantization: str,
    kernels: str,
    tensor_size: int = 1,
    whole_experts: bool = False,
) -> str:
    """16 hexadecimal digits over weights, dtype, quantization, kernels, parallel sizes and versions.

    kernels: of `cpu_kernels` or `gpu_kernels`; they settle the KV cache's dtype, too. whole_experts: whether the ranks
    of a tensor group have whole experts, not a part of each, whose sums are others. Where the experts are, and how many
    replicas share them, changes no bit on CPUs, and on GPUs no more than the tensor group's size does.
    """
    parts = [
        ("weights", weights_digest),
        ("dtype", dtype),
        ("quantization", quantization),
        ("kernels", kernels),
        ("tensor", str(tensor_size)),
        ("octavo", octavo_version()),
        ("torch", torch.__version__),
    ]
    if whole_experts:
        parts.append(("experts", "whole"))
    return hashlib.sha256("\n".join(f"{name}={value}" for name, value in parts).encode()).hexdigest()[:16]
