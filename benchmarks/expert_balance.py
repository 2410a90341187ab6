"""How evenly ranks are loaded with experts in their order, and with them balanced and some copied.

    python -m benchmarks.expert_balance [--experts 64] [--ranks 8] [--layers 32]

Loads are tokens drawn by a Zipf law, experts in random order, another one in each layer. Shown is what the busiest rank
has to do over the mean of all, for a step waits for it: the mean over the layers, and that of the worst layer.
"""

import argparse

import numpy as np

from worker.parallel.expert_balance import balance_experts, loads_of_ranks

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
    print("exponent   copies   in order: mean  worst   balanced: mean  worst")
    for exponent in _EXPONENTS:
        generator = np.random.default_rng(0)
        zipf_N = 2000 / np.arange(1, given.experts + 1) ** exponent
        load_LN = np.array([generator.poisson(generator.permutation(zipf_N)) for _ in range(given.layers)])
        before = [imbalance(load_N, np.arange(given.experts), given.ranks) for load_N in load_LN]
        for copies in _COPIES:
            found = balance_experts(load_LN, num_slots=given.experts + copies, num_ranks=given.ranks)
            after = [
                imbalance(load_N, slots_S, given.ranks)
                for load_N, slots_S in zip(load_LN, found.physical_to_logical_LS, strict=True)
            ]
            print(
                f"{exponent:8.1f} {copies:8d} {np.mean(before):15.2f} {max(before):6.2f} {np.mean(after):16.2f} "
                f"{max(after):6.2f}"
            )


if __name__ == "__main__":
    main()
