"""Root mean square layer norm (arXiv 1910.07467)."""

from kernels.rms_norm.cpu import rms_norm

__all__ = ["rms_norm"]
