"""Moves blocks of the KV cache between a GPU and pinned host memory, beside the computation: see gpu.py."""

from kernels.block_swap.runs import Run, merge_runs

__all__ = ["Run", "merge_runs"]
