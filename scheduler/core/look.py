"""A look at a core's sequences and blocks, for people who watch it. Bounded: about 2 ms, however large the core is."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice

from scheduler.core.state.request import Sequence
from scheduler.core.state.state import State

# Sequences that are shown, at most, and the cells of the map of blocks.
_MOST_SEQUENCES = 256
_MOST_CELLS = 512
# Blocks that the map looks at, at most: 70 ns each.
_MOST_BLOCKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLook:
    """Mirrors admin.proto's SequenceView."""

    request_id: str
    choice: int
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLook:
    """used, cached: the map of blocks, as in admin.proto's ReplicaView."""

    sequences: tuple[SequenceLook, ...]
    num_cached_blocks: int
    used: bytes
    cached: bytes


def look(state: State) -> CoreLook:
    used, cached = _map(state)
    return CoreLook(
        sequences=tuple(_look_at(state, sequence) for sequence in islice(_in_order(state), _MOST_SEQUENCES)),
        num_cached_blocks=state.pool.num_cached,
        used=used,
        cached=cached,
    )


def _in_order(state: State) -> Iterator[Sequence]:
    """Yields running sequences, then others. Bounded as well: a hundred thousand groups may wait."""
    running = list(state.running.by_generation.values())
    known = {sequence.key for sequence in running}
    others = (each for each in islice(state.sequences(), 16 * _MOST_SEQUENCES) if each.key not in known)
    return chain(running, others)


def _look_at(state: State, sequence: Sequence) -> SequenceLook:
    is_running = sequence.generation in state.running.by_generation
    num_tokens = state.running.num_known(sequence) if is_running else sequence.num_tokens
    return SequenceLook(
        request_id=sequence.group.request.request_id,
        choice=sequence.choice,
        status=sequence.status.value,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=num_tokens - sequence.num_prompt_tokens,
        # A decoding sequence has computed all tokens but the last.
        num_computed_tokens=num_tokens - 1 if sequence.is_decoding else sequence.num_computed_tokens,
        num_blocks=len(sequence.block_ids),
    )


def _map(state: State) -> tuple[bytes, bytes]:
    pool = state.pool
    seen, cells = _cells(pool.num_blocks)
    return _shares(map(pool.is_used, seen), cells), _shares(map(pool.is_cached, seen), cells)


@lru_cache(maxsize=4)
def _cells(num_blocks: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Returns the blocks that the map looks at, and where those of each cell begin and end among them."""
    num_cells = min(num_blocks, _MOST_CELLS)
    seen, cells = list[int](), list[tuple[int, int]]()
    for cell in range(num_cells):
        # Blocks count from 1.
        first, end = 1 + cell * num_blocks // num_cells, 1 + (cell + 1) * num_blocks // num_cells
        blocks = range(first, end, max(1, (end - first) * num_cells // _MOST_BLOCKS))
        cells.append((len(seen), len(seen) + len(blocks)))
        seen += blocks
    return tuple(seen), tuple(cells)


def _shares(flags: Iterable[bool], cells: Iterable[tuple[int, int]]) -> bytes:
    """Returns a byte for each cell, 255 if all of its flags are true. A sum a cell takes five times as long."""
    sums = list(accumulate(flags, initial=0))
    return bytes(255 * (sums[end] - sums[begin]) // (end - begin) for begin, end in cells)
