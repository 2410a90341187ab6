"""The only place where the properties look into the core: what it believes of tables, tokens and names."""

from dataclasses import dataclass

from scheduler.core.core import Core
from scheduler.core.messages import BlockRemoved, BlockStored, CacheCleared, CacheEvent, SequenceKey


@dataclass(frozen=True, slots=True)
class CoreTable:
    """Of a running sequence."""

    row: int
    generation: int
    block_ids: list[int]
    # Tokens of steps in flight count.
    num_computed_tokens: int


def tables(core: Core) -> dict[SequenceKey, CoreTable]:
    """Of every running sequence. To be asked after `check_integrity`, which brings them up to date."""
    return {
        sequence.key: CoreTable(
            sequence.row, sequence.generation, list(sequence.block_ids), sequence.num_computed_tokens
        )
        for group in core._state.groups.values()
        for sequence in group.sequences.values()
        if sequence.row >= 0
    }


def names(core: Core) -> set[bytes]:
    """Of the blocks that can be found."""
    return set(core._state.pool._block_of)


def is_isolating(core: Core) -> bool:
    """One group is computed alone, for it may be why workers fail: the usual order does not hold."""
    return core._state.fault_isolation.is_isolating


class CacheMirror:
    """What a router that listens believes can be found."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def take(self, events: list[CacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(name):
                    assert name not in self.names, "stored twice"
                    self.names.add(name)
                case BlockRemoved(name):
                    assert name in self.names, "removed without being stored"
                    self.names.remove(name)
                case CacheCleared():
                    self.names.clear()
