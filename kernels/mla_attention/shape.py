"""The sizes of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) with absorbed weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """`num_heads` queries share one latent vector a token, key and value at once, and one key part turned by rope."""

    num_heads: int
    latent_size: int = 512
    rope_size: int = 64

    @property
    def entry_size(self) -> int:
        """Numbers of a token in the cache, and of a query."""
        return self.latent_size + self.rope_size
