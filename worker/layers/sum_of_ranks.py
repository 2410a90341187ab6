"""Where the ranks of a tensor-parallel group put together what each has computed a part of.

Legend: T tokens, E hidden size.
"""

from collections.abc import Callable

import torch

from kernels.linear import Residual, Stream
from worker.forward_context import current


def add_sum_of_ranks_(x_TE: Stream, add_to_: Callable[[Stream], None]) -> None:
    """Adds to the residual stream, in place, what add_to_ adds to the stream it is given, summed over all ranks."""
    context = current()
    if context.group.size == 1:
        add_to_(x_TE)
    elif isinstance(x_TE, Residual):
        add_to_(x_TE)
        context.group.sum_(x_TE.delta_TE)
    else:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32).zero_()
        add_to_(part_TE)
        context.group.sum_(part_TE)
        x_TE += part_TE
