"""How far the queries of a layer see."""

from typing import NamedTuple


class Reach(NamedTuple):
    """Of the tokens before it, which ones a query sees; see kernels.paged_attention.AttentionPlanner."""

    window: int = 0
    attention_chunk: int = 0
