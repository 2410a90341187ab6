"""The residual stream of a step.

Legend: T tokens, E hidden size.
"""

import torch


class Residual:
    """x_TE + pending_TE. On a GPU, what a linear adds to the stream is `pending` until the next one norms the stream,
    whose kernel adds it; on a CPU it is added at once."""

    __slots__ = ("pending_TE", "x_TE")

    def __init__(self, x_TE: torch.Tensor, pending_TE: torch.Tensor | None = None) -> None:
        """x_TE: float32, contiguous. pending_TE: of the compute dtype."""
        self.x_TE, self.pending_TE = x_TE, pending_TE

    def __len__(self) -> int:
        return len(self.x_TE)

    def rows(self, indices: torch.Tensor) -> "Residual":
        """A copy of these tokens'."""
        return Residual(self.x_TE[indices], None if self.pending_TE is None else self.pending_TE[indices])
