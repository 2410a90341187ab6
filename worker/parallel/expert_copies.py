"""Which experts get copies, and where: by how many tokens each expert had.

As in EPLB (arXiv 2412.19437, section 3.4; github.com/deepseek-ai/EPLB) an expert's tokens are dealt out evenly over its
copies. Unlike there, an expert has a home that it never leaves, and only copies move: a tenth of the weights. So copies
are chosen by what they do for the ranks: the next one is that which lowers the sum of the squares of their loads most.

Legend: N experts, R ranks.
"""

import numpy as np

from worker.parallel.expert_placement import ExpertPlacement


def balanced(placement: ExpertPlacement, tokens_N: np.ndarray) -> ExpertPlacement:
    """With the copies that even out these loads of experts (int64 [N]). The same wherever it is computed.

    Slots stay empty where a copy would even out nothing. A rank has an expert once at most.
    """
    free = [list(placement.copy_slots_of(rank)) for rank in range(placement.num_ranks)]
    has_NR = np.zeros((placement.num_experts, placement.num_ranks), np.bool_)
    for rank in range(placement.num_ranks):
        has_NR[placement.experts_of(rank), rank] = True
    copies: dict[int, int] = {}
    while True:
        num_copies_N = has_NR.sum(axis=1)
        share_N, share_with_one_more_N = tokens_N / num_copies_N, tokens_N / (num_copies_N + 1)
        loads_R = share_N @ has_NR
        # Of the sum of squares, if rank r gets a copy of expert n: those that have it lose a little, r gets a share.
        less_N = share_N - share_with_one_more_N
        lost_N = less_N * (less_N * num_copies_N - 2 * (has_NR @ loads_R))
        change_NR = lost_N[:, None] + share_with_one_more_N[:, None] * (share_with_one_more_N[:, None] + 2 * loads_R)
        change_NR[has_NR] = np.inf
        change_NR[:, [not slots for slots in free]] = np.inf
        # The lowest expert, then the lowest rank, of equals.
        expert, rank = divmod(int(change_NR.argmin()), placement.num_ranks)
        if change_NR[expert, rank] >= 0:
            return placement.with_copies(copies)
        copies[free[rank].pop(0)] = expert
        has_NR[expert, rank] = True
