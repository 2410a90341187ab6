"""The gated activation of MLPs (arXiv 2002.05202): silu(gate) * up of the llama family, gelu(gate) * up of Gemma."""

from kernels.silu_mul.activation import Activation
from kernels.silu_mul.cpu import silu_mul

__all__ = ["Activation", "silu_mul"]
