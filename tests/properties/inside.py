"""The only place where property tests read the core's private state: tables, token counts and block names."""

from dataclasses import dataclass

from scheduler.core.core import Core
from scheduler.core.messages import BlockRemoved, BlockStored, CacheCleared, CacheEvent, SequenceKey


@dataclass(frozen=True, slots=True)
class CoreTable:
    """The core's state of a running sequence."""

    row: int
    generation: int
    block_ids: list[int]
    # Includes tokens of steps in flight.
    num_computed_tokens: int


def tables(core: Core) -> dict[SequenceKey, CoreTable]:
    """The table of every running sequence. Call it after `check_integrity`, which brings tables up to date."""
    return {
        sequence.key: CoreTable(
            sequence.row, sequence.generation, list(sequence.block_ids), sequence.num_computed_tokens
        )
        for group in core._state.groups.values()
        for sequence in group.sequences.values()
        if sequence.row >= 0
    }


def names(core: Core) -> set[bytes]:
    """Names of the blocks that the prefix cache can find."""
    return set(core._state.pool._block_of)


def items(core: Core) -> tuple[set[int], set[int]]:
    """Numbers of the items that have embeddings in the workers, and of those that have an input there or soon will."""
    state = core._state.items
    known = state._by_number.values()
    return (
        {item.number for item in known if item.is_cached},
        {item.number for item in known if item.input.value != "absent"} | set(state._forgotten),
    )


def forgotten(core: Core) -> set[int]:
    """Numbers of the items that the next plan forgets."""
    return set(core._state.items._forgotten)


def is_isolating(core: Core) -> bool:
    """True while a group suspected of failing workers is computed alone: the usual order does not hold."""
    return core._state.fault_isolation.is_isolating


def margin(core: Core) -> float:
    """The factor of predicted times of steps before they are compared with the target."""
    pace = core._state.pace
    assert pace is not None
    return pace._margin


class CacheMirror:
    """The blocks that a router listening to cache events believes can be found."""

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
