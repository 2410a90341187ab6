"""y = x W^T + b with weights packed once for the machine at hand."""

from kernels.linear.cpu import GemmPath, PackedLinear, gemm_path

__all__ = ["GemmPath", "PackedLinear", "gemm_path"]
