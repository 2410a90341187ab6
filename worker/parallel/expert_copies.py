"""Which experts get copies, and where: by how many tokens each expert had.

After EPLB (github.com/deepseek-ai/EPLB): an expert's tokens are dealt out over its copies, so the next copy goes to the
expert that has the most tokens a copy. Unlike there, an expert has a home that it never leaves; only copies move.
"""

import numpy as np

from worker.parallel.expert_placement import ExpertPlacement


def balanced(placement: ExpertPlacement, tokens_N: np.ndarray) -> ExpertPlacement:
    """With the copies that even out these loads of experts (int64 [N]). The same wherever it is computed.

    Copies of experts without tokens are of no use: their slots stay empty, and so do those for which only experts that
    are there already are left.
    """
    num_copies_N = np.ones(placement.num_experts, np.int64)
    free = [list(placement.copy_slots_of(rank)) for rank in range(placement.num_ranks)]
    held = [set(placement.experts_of(rank)) for rank in range(placement.num_ranks)]
    # A rank has an expert once at most.
    most_N = [
        1 + sum(bool(free[rank]) and expert not in held[rank] for rank in range(placement.num_ranks))
        for expert in range(placement.num_experts)
    ]
    chosen: list[int] = []
    for _ in range(sum(map(len, free))):
        share_N = np.where(num_copies_N < most_N, tokens_N / num_copies_N, 0.0)
        expert = int(share_N.argmax())
        if share_N[expert] == 0:
            break
        num_copies_N[expert] += 1
        chosen.append(expert)

    share_N = tokens_N / num_copies_N
    loads = [float(share_N[placement.experts_of(rank)].sum()) for rank in range(placement.num_ranks)]
    copies: dict[int, int] = {}
    # The heaviest first, each to the rank that has the least to do.
    for expert in sorted(chosen, key=lambda expert: (-share_N[expert], expert)):
        ranks = [rank for rank in range(placement.num_ranks) if free[rank] and expert not in held[rank]]
        if ranks:
            rank = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[rank] += float(share_N[expert])
            held[rank].add(expert)
            copies[free[rank].pop(0)] = expert
    return placement.with_copies(copies)
