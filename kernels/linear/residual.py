"""The residual stream of a step on a GPU.

Legend: T tokens, E hidden size.
"""

import torch


class Residual:
    """The residual stream x_TE, with delta_TE still to be added while is_pending.

    What a linear adds to the stream stays pending until the stream's next norm, whose kernel adds it: that reads both
    once, while adding it at once would take another pass. On a CPU the stream is a float32 tensor, added to in place.
    """

    __slots__ = ("delta_TE", "is_pending", "x_TE")

    def __init__(self, x_TE: torch.Tensor, delta_TE: torch.Tensor, *, is_pending: bool = False) -> None:
        """x_TE: float32. delta_TE: in the compute dtype. Both contiguous."""
        self.x_TE, self.delta_TE, self.is_pending = x_TE, delta_TE, is_pending

    def __len__(self) -> int:
        return len(self.x_TE)

    def __getitem__(self, indices: torch.Tensor) -> "Residual":
        """A copy of these tokens' stream."""
        return Residual(self.x_TE[indices], self.delta_TE[indices], is_pending=self.is_pending)
