"""A router's PrefixIndex of one replica."""

from collections.abc import Iterable, Sequence

from protos.scheduler_pb2 import CacheEvent
from router.replicas.policies.prefix_index import PrefixIndex


class CacheView:
    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._index = PrefixIndex()
        self._index.add(0, block_size=block_size, max_blocks=max_blocks)

    def __len__(self) -> int:
        return self._index.num_known(0)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        self._index.apply(0, events)

    def num_cached_tokens(self, names: Sequence[bytes]) -> int:
        return self._index.block_size * self._index.num_cached_blocks(names).get(0, 0)
