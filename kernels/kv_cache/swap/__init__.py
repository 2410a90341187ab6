"""Copies blocks of the KV cache between two pools: to host memory and back."""

from kernels.kv_cache.swap.torch_cpu import block_copy

__all__ = ["block_copy"]
