"""Root mean square layer norm (arXiv 1910.07467)."""

from kernels.elementwise.rms_norm.torch_cpu import add_rms_norm_, rms_norm

__all__ = ["add_rms_norm_", "rms_norm"]
