"""Names everything that decides a replica's numbers: replicas of one name continue each other's outputs exactly."""

import hashlib

import torch

from runtime.version import octavo_version


def kernel_path(kernels: str) -> str:
    """Which kernels compute here, as far as their results may differ: the model's own, the vector width, and the
    threads a sum may be split over."""
    return f"{kernels}-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}"


def fingerprint(
    *, weights_digest: str, dtype: str, quantization: str, kernels: str, tensor_size: int = 1, pipeline_size: int = 1
) -> str:
    """16 hexadecimal digits over weights, dtype, quantization, kernel path, parallel sizes and versions.

    kernels: the name of the model's compute path, which also settles the KV cache's dtype.
    """
    parts = (
        ("weights", weights_digest),
        ("dtype", dtype),
        ("quantization", quantization),
        ("kernels", kernel_path(kernels)),
        ("tensor", str(tensor_size)),
        ("pipeline", str(pipeline_size)),
        ("octavo", octavo_version()),
        ("torch", torch.__version__),
    )
    return hashlib.sha256("\n".join(f"{name}={value}" for name, value in parts).encode()).hexdigest()[:16]
