"""Choosing tokens from logits. `reference.py` says the same in the plainest way."""

from kernels.sampling.draw import draw, greedy, most_likely
from kernels.sampling.draw_rows import draw_rows
from kernels.sampling.penalties import apply_logit_bias, apply_penalties

__all__ = ["apply_logit_bias", "apply_penalties", "draw", "draw_rows", "greedy", "most_likely"]
