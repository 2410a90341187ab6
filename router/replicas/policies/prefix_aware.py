"""Chooses the replica that can give the first token soonest: with the least waiting work plus uncached prompt.

A replica with a long prefix in its cache is chosen until its queue is longer, by a little, than what the cache saves;
then another one computes the prefix, and has it too. If no cache has a prefix, replicas with about equal work take
turns.
"""

from collections.abc import Sequence

from router.accepted import RoutingHints
from router.replicas.policies.base import ReplicaLoad, ready
from router.replicas.policies.prefix_index import PrefixIndex
from runtime.block_hashes import hash_prompt_blocks, scope_of

# Replicas whose costs differ by no more count as equal: the longest cached prefix decides, then turns. A Load is as old
# as a step, which computes about as many tokens. Simulated (benchmarks.router.virtual_cluster): with 0, prompts that
# share nothing wait 2% longer than with turns, as replicas are chosen by differences that are out of date; and of the
# other prompts' prefixes 50%, not 59%, are found.
_NEAR_TOKENS = 512


class PrefixAware:
    """Knows what caches hold from the schedulers' events, and from where this router has sent which prompts."""

    name = "prefix_aware"

    def __init__(self) -> None:
        self.prefix_index = PrefixIndex()
        self._last = -1

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        if len(loads) == 1:
            return 0, "only"
        index = self.prefix_index
        names = hash_prompt_blocks(hints.token_ids, index.block_size, scope_of(hints.cache_salt), hints.items)
        found = index.num_cached_blocks(names)
        cached = {i: index.block_size * found.get(loads[i].replica, 0) for i in ready(loads)}
        costs = {i: loads[i].num_tokens - num_tokens for i, num_tokens in cached.items()}
        most = min(costs.values()) + _NEAR_TOKENS
        near = [i for i, cost in costs.items() if cost <= most]
        longest = max(cached[i] for i in near)
        equals = [i for i in near if cached[i] == longest]
        # In turns: the lowest number above the last one, else the lowest.
        chosen = min(equals, key=lambda i: (loads[i].replica <= self._last, loads[i].replica))
        self._last = loads[chosen].replica
        index.expect(loads[chosen].replica, names)
        if cached[chosen] < max(cached.values()):
            return chosen, "balance"
        return chosen, "prefix" if cached[chosen] else "load"
