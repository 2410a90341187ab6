"""Copies blocks of the KV cache from one pool to another: to host memory and back."""

from kernels.block_copy.cpu import block_copy

__all__ = ["block_copy"]
