"""Root mean square layer norm (arXiv 1910.07467)."""

from kernels.rms_norm.cpu import add_rms_norm_, rms_norm

__all__ = ["add_rms_norm_", "rms_norm"]
