"""How the heads of a layer share keys and values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """`num_heads` queries share `num_kv_heads` keys and values of `head_size`."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads
