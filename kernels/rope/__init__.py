"""Rotary position embeddings (arXiv 2104.09864)."""

from kernels.rope.cpu import apply_rope_, interleave_rope_pairs, rope_turns

__all__ = ["apply_rope_", "interleave_rope_pairs", "rope_turns"]
