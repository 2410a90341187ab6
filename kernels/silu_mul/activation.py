"""What a gate goes through before it multiplies."""

from typing import Literal

# gelu in its tanh form (arXiv 1606.08415).
Activation = Literal["silu", "gelu_tanh"]
