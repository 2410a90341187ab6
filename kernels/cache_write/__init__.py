"""Stores the keys and values of new tokens in their slots of the KV cache."""

from kernels.cache_write.cpu import cache_write

__all__ = ["cache_write"]
