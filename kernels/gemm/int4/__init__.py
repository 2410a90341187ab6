"""GEMM of floats with 4-bit weights on a GPU (W4A16)."""
