"""Rotary position embeddings (arXiv 2104.09864)."""

from kernels.rope.cpu import apply_rope_, interleave_rope_pairs, rope_turns, turn_pairs_
from kernels.rope.turns import RopeTurns

__all__ = ["RopeTurns", "apply_rope_", "interleave_rope_pairs", "rope_turns", "turn_pairs_"]
