"""The gated activation of MLPs (arXiv 2002.05202): silu(gate) * up of the llama family, gelu(gate) * up of Gemma,
gpt-oss's clamped SwiGLU."""

from kernels.elementwise.silu_mul.torch_cpu import Activation, multiply_by_sigmoid_, silu_mul

__all__ = ["Activation", "multiply_by_sigmoid_", "silu_mul"]
