"""Ranks that compute a step together."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Group(Protocol):
    """Every rank of it makes the same calls in the same order, with tensors of the same shape and dtype."""

    rank: int
    size: int
    # Under way, for messages.
    step: int

    def sum_(self, x: torch.Tensor) -> None:
        """Replaces x, contiguous, by the sum over all ranks: added up from rank 0 on, so that it has the same bits on
        each and whatever else is in the tensor. (In a ring's sum the order depends on the position.)"""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape], contiguous: what each rank gave."""
        ...

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """To each rank rows of x [sum(sent), ...], in the order of ranks; what each rank has sent to this one,
        [sum(received), ...], in the same order. sent, received: rows for and from each rank; the numbers of both ends
        are equal. The one call whose shapes differ between ranks."""
        ...

    def leave(self) -> None:
        """Calls of other ranks fail if they wait for this one, and so do later ones here."""
        ...


class Alone:
    """A group of one."""

    rank, size, step = 0, 1, 0

    def sum_(self, x: torch.Tensor) -> None:
        pass

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x

    def leave(self) -> None:
        pass


class Rehearsal:
    """A rank of a group without the others: for a warm-up, whose results mean nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.step = rank, size, 0

    def sum_(self, x: torch.Tensor) -> None:
        pass

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape).contiguous()

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x.new_zeros((sum(received), *x.shape[1:]))

    def leave(self) -> None:
        pass


def alone_or_rehearsal(rank: int, size: int) -> Group:
    """Until the ranks are connected."""
    return Alone() if size == 1 else Rehearsal(rank, size)
