"""The sizes of a layer that carries a state from token to token, and of the state in a block."""

from dataclasses import dataclass
from typing import Literal

# mamba2: a state-space model (arXiv 2405.21060). delta: the gated delta rule (arXiv 2412.06464).
Rule = Literal["mamba2", "delta"]
# The largest sizes that the C++ kernel has room for: kMostNumbers and kMostTaps of recurrent.h.
MOST_NUMBERS, MOST_TAPS = 512, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """A layer's sizes. recurrent.h beside this file describes its input and its state."""

    rule: Rule
    num_heads: int
    # Each has the keys and queries of num_heads / num_groups successive heads.
    num_groups: int
    key_size: int
    value_size: int
    # Tokens that the convolution reads, the token itself included.
    num_taps: int
    # Numbers of a result that are normed together.
    norm_size: int

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads < 1 or self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads must be a multiple of {self.num_groups} groups of keys")
        for name, size in (("keys", self.key_size), ("values", self.value_size)):
            if not 1 <= size <= MOST_NUMBERS:
                raise ValueError(f"a head's {name} have {size} numbers: 1 to {MOST_NUMBERS} work")
        if not 2 <= self.num_taps <= MOST_TAPS:
            raise ValueError(f"the convolution reads {self.num_taps} tokens: 2 to {MOST_TAPS} work")
        assert self.results % self.norm_size == 0

    @property
    def results(self) -> int:
        """Numbers of a token's result."""
        return self.num_heads * self.value_size

    @property
    def keys(self) -> int:
        """Numbers of a token's keys, in all groups."""
        return self.num_groups * self.key_size

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: values, keys and queries."""
        return self.results + 2 * self.keys

    @property
    def padded_channels(self) -> int:
        return padded(self.channels)

    @property
    def width(self) -> int:
        """Numbers of a token's input: channels, gates, steps, and betas of the delta rule."""
        return self.channels + self.results + self.num_heads * (2 if self.rule == "delta" else 1)

    @property
    def window(self) -> int:
        """Numbers of a slot for the convolution."""
        return (self.num_taps - 1) * self.padded_channels

    @property
    def slot(self) -> int:
        """Numbers of the state in a block, float32."""
        return self.window + self.num_heads * self.key_size * padded(self.value_size)


def padded(size: int) -> int:
    """The size in whole vectors of 8."""
    return -(-size // 8) * 8
