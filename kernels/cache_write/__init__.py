"""Stores the keys and values of new tokens in their slots of the KV cache, on the path of PyTorch; the C++ path does it
with rope, in kernels.rope_cache_write."""

from kernels.cache_write.cpu import cache_write

__all__ = ["cache_write"]
