"""The union of several replicas' prefix caches: what an outside router may expect to find at the cluster."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


@dataclass(frozen=True, slots=True)
class Block:
    """A block that can be found. parent: the hash of the block before it. extra_keys: what its hash is made of beside
    tokens (runtime.kv_events)."""

    block_hash: int
    parent: int | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...] = ()


# A block that any replica has now and none had before, or the hash of one that no replica has any more.
Change = Block | int


class CacheUnion:
    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        # The blocks of each replica.
        self._held: dict[int, set[int]] = {}
        self._num_holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, replica: int, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> list[Change]:
        """Applies a replica's events, in order. Returns what changes in the union."""
        changes: list[Change] = []
        held = self._held.setdefault(replica, set())
        for event in events:
            match event:
                case BlockStored():
                    changes += [block for block in _blocks_of(event) if self._store(held, block)]
                case BlockRemoved():
                    changes += [each for each in event.block_hashes if self._remove(held, each)]
                case AllBlocksCleared():
                    changes += [each for each in list(held) if self._remove(held, each)]
        return changes

    def blocks(self) -> Iterator[Block]:
        """Yields all blocks, each after the one before it if that is there."""
        told: set[int] = set()
        for block in self._blocks.values():
            chain = []
            while block.block_hash not in told:
                chain.append(block)
                told.add(block.block_hash)
                parent = None if block.parent is None else self._blocks.get(block.parent)
                if parent is None:
                    break
                block = parent
            yield from reversed(chain)

    def _store(self, held: set[int], block: Block) -> bool:
        """Returns True if no replica had it."""
        if block.block_hash in held:
            return False
        held.add(block.block_hash)
        count = self._num_holders[block.block_hash] = self._num_holders.get(block.block_hash, 0) + 1
        if count > 1:
            return False
        self._blocks[block.block_hash] = block
        return True

    def _remove(self, held: set[int], block_hash: int) -> bool:
        """Returns True if no replica has it any more."""
        if block_hash not in held:
            return False
        held.discard(block_hash)
        self._num_holders[block_hash] -= 1
        if self._num_holders[block_hash]:
            return False
        del self._num_holders[block_hash], self._blocks[block_hash]
        return True


def _blocks_of(event: BlockStored) -> Iterator[Block]:
    parent, size = event.parent_block_hash, event.block_size
    for index, block_hash in enumerate(event.block_hashes):
        keys = event.extra_keys[index] if event.extra_keys is not None else None
        yield Block(block_hash, parent, tuple(event.token_ids[index * size : (index + 1) * size]), tuple(keys or ()))
        parent = block_hash
