"""How evenly ranks are loaded with experts in their order, with copies as workers choose them, and as EPLB does.

    python -m benchmarks.expert_balance [--experts 64] [--ranks 8] [--layers 32]

Workers leave each expert where it is at home and only move copies; the published balancer moves everything. Loads are
tokens drawn by a Zipf law, experts in random order, another one in each layer. Shown is what the busiest rank has to do
over the mean of all, for a step waits for it: the mean over the layers, and that of the worst layer.
"""

import argparse

import numpy as np

from benchmarks.published_balance import balance_experts, loads_of_ranks
from worker.parallel.expert_copies import balanced
from worker.parallel.expert_placement import ExpertPlacement

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
    """Of slots that may be empty."""
    experts_S, ranks_S = placement.experts_S.numpy(), placement.ranks_S.numpy()
    is_used = experts_S >= 0
    num_copies_N = np.bincount(experts_S[is_used], minlength=len(load_N))
    loads = np.bincount(ranks_S[is_used], (load_N / num_copies_N)[experts_S[is_used]], placement.num_ranks)
    return float(loads.max() / loads.mean())


if __name__ == "__main__":
    main()
