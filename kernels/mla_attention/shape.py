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

    def check_for_gpus(self) -> None:
        """Raises ValueError for sizes that the Triton kernels don't know."""
        for name, size, least in (("latent", self.latent_size, 64), ("rope", self.rope_size, 16)):
            if size < least or size & (size - 1):
                raise ValueError(f"{name} size {size}: powers of two from {least} on work")
        if self.latent_size > 512 or self.rope_size > 64:
            raise ValueError(
                f"latent size {self.latent_size} and rope size {self.rope_size}: 512 and 64 are the most that fit into "
                "registers and shared memory"
            )
