"""Quantization to FP8: e4m3 numbers of one byte, and float32 scales to multiply them with.

triton.py has the public functions, and the parts for kernels that quantize their own outputs; reference.py has the
formulas in PyTorch.
"""
