"""Where the ranks of a tensor-parallel group put together what each has computed a part of.

Legend: T tokens, E hidden size.
"""

from collections.abc import Callable

import torch

from kernels.linear import Residual, Stream
from worker.forward_context import current
from worker.layers.added_norm import AddedNorm


def add_sum_of_ranks_(x_TE: Stream, add_to_: Callable[[Stream], None], norm: AddedNorm | None = None) -> None:
    """Adds to the residual stream, in place, what add_to_ adds to the stream it is given, summed over all ranks, and
    normed if there is a norm."""
    context = current()
    if not len(x_TE):
        return
    if context.group.size == 1 and norm is None:
        add_to_(x_TE)
    elif isinstance(x_TE, Residual):
        add_to_(x_TE)
        context.group.sum_(x_TE.delta_TE)
        if norm is not None:
            norm.norm_(x_TE.delta_TE)
    elif norm is None:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32).zero_()
        add_to_(part_TE)
        context.group.sum_(part_TE)
        x_TE += part_TE
    else:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32)
        norm.clear_(part_TE)
        add_to_(part_TE)
        context.group.sum_(part_TE)
        norm.add_to_(x_TE, part_TE)
