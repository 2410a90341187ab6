"""The replica that can give the first token soonest: what waits there, and what of the prompt it has to compute.

So a replica with a long prefix in its cache is chosen until its queue is longer than what the cache saves; then another
one computes the prefix, and has it, too.
"""

from collections.abc import Sequence

from router.policies.base import Placement, ReplicaLoad, ready
from router.prefix_index import PrefixIndex
from runtime.block_names import block_names, scope_of


class PrefixAware:
    """Knows what caches hold from the schedulers' events, and from what this router has sent where."""

    name = "prefix_aware"

    def __init__(self) -> None:
        self.prefix_index = PrefixIndex()
        self._turn = 0

    def choose(self, loads: Sequence[ReplicaLoad], placement: Placement) -> tuple[int, str]:
        if len(loads) == 1:
            return 0, "only"
        index = self.prefix_index
        names = block_names(placement.token_ids, index.block_size, scope_of(placement.cache_salt))
        found = index.num_cached_blocks(names)
        cached = {i: index.block_size * found.get(loads[i].replica, 0) for i in ready(loads)}
        costs = {i: loads[i].num_tokens - num_tokens for i, num_tokens in cached.items()}
        least = min(costs.values())
        equals = [i for i, cost in costs.items() if cost == least]
        self._turn += 1
        chosen = equals[self._turn % len(equals)]
        index.expect(loads[chosen].replica, names)
        if cached[chosen] < max(cached.values()):
            return chosen, "balance"
        return chosen, "prefix" if cached[chosen] else "load"
