"""Compares how evenly ranks are loaded with experts in order, with copies as workers choose them, and with EPLB.

    python -m benchmarks.parallel.expert_balance [--experts 64] [--ranks 8] [--layers 32]

Workers leave each expert on its home rank and only move copies; the published balancer moves everything. Loads are
tokens drawn by a Zipf law, with experts in a random order that differs in each layer. A step waits for the busiest
rank, so the figure is that rank's load over the mean of all: the mean over the layers, and the worst layer.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from worker.parallel.expert_placement import ExpertPlacement, balanced


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedExperts:
    """A placement of experts, all int64. Slots are numbered rank by rank; each rank has the same number of them."""

    physical_to_logical_LS: np.ndarray  # the expert in each slot
    logical_to_physical_LNC: np.ndarray  # the slots of each expert in order, then -1
    num_copies_LN: np.ndarray


def balance_experts(
    load_LN: np.ndarray, *, num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 1
) -> BalancedExperts:
    """Places experts for these loads, each 0 or more: tokens of some period, for example.

    num_slots: slots of all ranks together. num_groups: groups of experts that stay together, because routers choose
    among groups; ignored unless a multiple of num_nodes. Raises ValueError for numbers that do not fit each other.
    """
    num_experts = load_LN.shape[1]
    if num_slots < num_experts or num_slots % num_ranks:
        raise ValueError(
            f"num_slots={num_slots} must be a multiple of num_ranks={num_ranks}, and {num_experts} or more: one for "
            f"each expert"
        )
    if num_ranks % num_nodes or num_experts % num_groups:
        raise ValueError(
            f"num_nodes={num_nodes} must divide num_ranks={num_ranks}, and num_groups={num_groups} the {num_experts} "
            f"experts"
        )
    if num_nodes > 1 and num_groups % num_nodes == 0:
        rows = [_in_groups(load_N, num_slots, num_ranks, num_nodes, num_groups) for load_N in load_LN]
    else:
        rows = [_balanced(load_N, num_slots // num_ranks, num_ranks) for load_N in load_LN]
    slots_LS = np.array([[expert for rank in ranks for expert in rank] for ranks in rows], np.int64)
    return _both_ways(slots_LS, num_experts)


def loads_of_ranks(load_N: np.ndarray, slots_S: np.ndarray, num_ranks: int) -> np.ndarray:
    """The load of each rank, float64, if an expert's load is spread evenly over its copies."""
    num_copies_N = np.bincount(slots_S, minlength=len(load_N))
    return (load_N / np.maximum(num_copies_N, 1))[slots_S].reshape(num_ranks, -1).sum(axis=1)


def _both_ways(slots_LS: np.ndarray, num_experts: int) -> BalancedExperts:
    num_copies_LN = np.array([np.bincount(slots_S, minlength=num_experts) for slots_S in slots_LS])
    slots_LNC = np.full((*num_copies_LN.shape, num_copies_LN.max()), -1, np.int64)
    for layer, slots_S in enumerate(slots_LS):
        for expert in range(num_experts):
            found = np.flatnonzero(slots_S == expert)
            slots_LNC[layer, expert, : len(found)] = found
    return BalancedExperts(
        physical_to_logical_LS=slots_LS, logical_to_physical_LNC=slots_LNC, num_copies_LN=num_copies_LN
    )


def _in_groups(load_N: np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> list[list[int]]:
    """The experts of each rank: places groups on nodes, then each node's experts on its ranks."""
    members_GM = np.arange(len(load_N)).reshape(num_groups, -1)
    load_G = load_N[members_GM].sum(axis=1)
    ranks: list[list[int]] = []
    for groups in _packed(range(num_groups), load_G, num_groups // num_nodes, num_nodes):
        experts = members_GM[sorted(groups)].flatten()
        in_node = _balanced(load_N[experts], num_slots // num_ranks, num_ranks // num_nodes)
        ranks += [[int(experts[each]) for each in rank] for rank in in_node]
    return ranks


def _balanced(load_N: np.ndarray, num_slots: int, num_ranks: int) -> list[list[int]]:
    """The experts of each rank, which has `num_slots` slots."""
    copies = _replicated(load_N, num_slots * num_ranks, num_ranks)
    share_N = load_N / np.bincount(copies, minlength=len(load_N))
    packed = _packed(copies, share_N, num_slots, num_ranks)
    in_order = [rank.tolist() for rank in np.array_split(np.arange(len(load_N)), num_ranks)]
    if all(in_order) and _most(in_order, load_N) < _most(packed, share_N):
        # Copies on their own expert's rank change no load.
        return [sorted(islice(cycle(rank), num_slots)) for rank in in_order]
    return [sorted(rank) for rank in packed]


def _replicated(load_N: np.ndarray, num_slots: int, num_ranks: int) -> list[int]:
    """The expert of each copy."""
    num_copies_N = np.ones(len(load_N), np.int64)
    for _ in range(num_slots - len(load_N)):
        # More copies than ranks are useless, but all slots must be filled.
        limit = max(num_ranks, int(num_copies_N.min()) + 1)
        num_copies_N[np.where(num_copies_N < limit, load_N / num_copies_N, -1.0).argmax()] += 1
    return np.repeat(np.arange(len(load_N)), num_copies_N).tolist()


def _packed(items: Sequence[int], load_N: np.ndarray, num_slots: int, num_ranks: int) -> list[list[int]]:
    """Packs items onto ranks of `num_slots` slots. Equal items go to different ranks, if there are enough ranks."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for item in sorted(items, key=lambda item: (-load_N[item], item)):
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < num_slots]
        without = [rank for rank in free if item not in ranks[rank]]
        place = min(without or free, key=lambda rank: (loads[rank], rank))
        full = [rank for rank in range(num_ranks) if item not in ranks[rank]]
        if not without and full:
            place = _make_room(item, place, full, ranks, loads, load_N)
        ranks[place].append(item)
        loads[place] += float(load_N[item])
    return ranks


def _make_room(
    item: int, free: int, full: list[int], ranks: list[list[int]], loads: list[float], load_N: np.ndarray
) -> int:
    """Moves another expert from a rank of `full` to the rank `free`, which already has the item; returns the rank that
    now has room. Chooses the move after which the busier of the two ranks has the least load. Full ranks hold more than
    `free`, so they have an expert that it lacks, unless they hold one twice: then nothing moves."""

    def busier(move: tuple[int, int]) -> tuple[float, int, int]:
        rank, other = move
        gain = float(load_N[other])
        return max(loads[free] + gain, loads[rank] - gain + float(load_N[item])), rank, other

    moves = [(rank, other) for rank in full for other in ranks[rank] if other not in ranks[free]]
    if not moves:
        return free
    rank, other = min(moves, key=busier)
    ranks[rank].remove(other)
    ranks[free].append(other)
    loads[rank] -= float(load_N[other])
    loads[free] += float(load_N[other])
    return rank


def _most(ranks: list[list[int]], load_N: np.ndarray) -> float:
    return max(float(load_N[rank].sum()) for rank in ranks)


_EXPONENTS = (0.5, 0.8, 1.1)
_COPIES = (0, 8, 16)


def imbalance(load_N: np.ndarray, slots_S: np.ndarray, num_ranks: int) -> float:
    loads = loads_of_ranks(load_N, slots_S, num_ranks)
    return float(loads.max() / loads.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    print("exponent   copies   in order: mean  worst   as workers: mean  worst   as EPLB: mean  worst")
    for exponent in _EXPONENTS:
        generator = np.random.default_rng(0)
        zipf_N = 2000 / np.arange(1, given.experts + 1) ** exponent
        load_LN = np.array([generator.poisson(generator.permutation(zipf_N)) for _ in range(given.layers)])
        in_order = [imbalance(load_N, np.arange(given.experts), given.ranks) for load_N in load_LN]
        for copies in _COPIES:
            homes = ExpertPlacement(given.experts, given.ranks, copies)
            served = [_imbalance_of(balanced(homes, load_N), load_N) for load_N in load_LN]
            found = balance_experts(load_LN, num_slots=given.experts + copies, num_ranks=given.ranks)
            published = [
                imbalance(load_N, slots_S, given.ranks)
                for load_N, slots_S in zip(load_LN, found.physical_to_logical_LS, strict=True)
            ]
            print(
                f"{exponent:8.1f} {copies:8d} {np.mean(in_order):15.2f} {max(in_order):6.2f} {np.mean(served):17.2f} "
                f"{max(served):6.2f} {np.mean(published):14.2f} {max(published):6.2f}"
            )


def _imbalance_of(placement: ExpertPlacement, load_N: np.ndarray) -> float:
    """The imbalance of a placement whose slots may be empty."""
    experts_S, ranks_S = placement.experts_S.numpy(), placement.ranks_S.numpy()
    is_used = experts_S >= 0
    num_copies_N = np.bincount(experts_S[is_used], minlength=len(load_N))
    loads = np.bincount(ranks_S[is_used], (load_N / num_copies_N)[experts_S[is_used]], placement.num_ranks)
    return float(loads.max() / loads.mean())


if __name__ == "__main__":
    main()
