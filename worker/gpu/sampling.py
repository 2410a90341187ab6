"""Choosing a step's tokens on the device."""

from enum import Enum


class SamplingKind(Enum):
    """What a step's rows demand of the kernels; a captured graph serves one kind. In order: each serves those before
    it, with the same tokens, and takes longer."""

    GREEDY = 0
    # Temperatures.
    DRAWS = 1
    # And top_k, top_p or min_p.
    FILTERS = 2
