"""The gated activation of the llama family's MLP: silu(gate) * up (arXiv 2002.05202)."""

from kernels.silu_mul.cpu import silu_mul

__all__ = ["silu_mul"]
