"""Quantization to FP8: e4m3 numbers of one byte, and float32 scales to multiply them with.

triton.py has the public functions and what other kernels share that quantize their own outputs, reference.py the
formulas in PyTorch.
"""
