"""Hands out KV blocks by number, counts their holders, and finds full ones by hash so that sequences share prefixes."""

import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Reversible

from runtime.block_hashes import hash_block, hash_scope, scope_of
from scheduler.core.messages import BlockContent, BlockRemoved, BlockStored, CacheCleared, CacheEvent, GroupRequest
from scheduler.core.state.request import Group, Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks that num_tokens tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks 1..num_blocks; block 0 is the null block and is never given out.

    A block is used (it has holders), cached (no holders, but its content is published and can be held again) or free.
    Free blocks are taken first, then cached ones, least recently used first. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, *, keep_unused: bool = True) -> None:
        """keep_unused: published blocks without holders stay cached until needed; otherwise they are free."""
        self._keep_unused = keep_unused
        # None: nobody watches.
        self._events: list[CacheEvent] | None = None
        self._tells_contents = False
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Forgets every block and every content."""
        if self._events is not None:
            self._events.append(CacheCleared())
        self.num_blocks = num_blocks
        # Low numbers are taken first.
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._num_holders = [0] * (num_blocks + 1)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that can be taken at once."""
        return len(self._free) + len(self._cached)

    @property
    def hashes(self) -> list[bytes]:
        """Hashes of the blocks that can be found."""
        return list(self._block_of)

    def is_used(self, block: int) -> bool:
        return self._num_holders[block] > 0

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def fits(self, shared: Iterable[int], count: int) -> bool:
        """True if `count` blocks could be taken after holding the `shared` ones."""
        num_holders = self._num_holders
        return count + sum(not num_holders[block] for block in shared) <= self.num_available

    def take(self, count: int) -> list[int]:
        """Takes blocks of unknown content and gives each one holder. Enough must be available."""
        assert count <= self.num_available
        free = self._free
        while len(free) < count:
            block, _ = self._cached.popitem(last=False)
            self.unpublish(block)
            free.append(block)
        blocks = free[: -count - 1 : -1] if count else []
        del free[len(free) - count :]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that are used or cached."""
        for block in blocks:
            if not self._num_holders[block]:
                del self._cached[block]
            self._num_holders[block] += 1

    def release(self, blocks: Reversible[int]) -> None:
        """Removes a holder from each of a sequence's blocks, last block first: the beginning of a prefix is worth most,
        so it stays cached longest."""
        num_holders = self._num_holders
        for block in reversed(blocks):
            num_holders[block] -= 1
            if num_holders[block]:
                continue
            if self._keep_unused and block in self._hash_of:
                self._cached[block] = None
            else:
                self.unpublish(block)
                self._free.append(block)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, used or cached."""
        return self._block_of.get(block_hash)

    @property
    def tells_contents(self) -> bool:
        """True if `publish` needs the content of blocks for its events."""
        return self._tells_contents

    def publish(self, block: int, block_hash: bytes, content: BlockContent | None = None) -> None:
        """Makes a held block findable by its content. Among blocks of equal content, the first one stays findable."""
        assert self._num_holders[block] > 0
        assert block not in self._hash_of
        if self._block_of.setdefault(block_hash, block) == block:
            self._hash_of[block] = block_hash
            if self._events is not None:
                self._events.append(BlockStored(block_hash, content))

    def unpublish(self, block: int) -> None:
        """Hides a block, which must not be cached."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self._events is not None:
                self._events.append(BlockRemoved(block_hash))

    def unpublish_all(self) -> int:
        """Hides all blocks; cached ones become free. Returns how many could be found."""
        num_found = len(self._block_of)
        # Keeps the order in which they would have been taken.
        self._free[:0] = reversed(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()
        if self._events is not None:
            self._events.append(CacheCleared())
        return num_found

    # --- Events

    def watch(self, enabled: bool, *, contents: bool = False) -> None:
        """Starts or stops keeping events for `take_events`; the first ones list what can be found now. contents: events
        have the contents of blocks that are published from now on."""
        self._tells_contents = enabled and contents
        self._events = [CacheCleared(), *map(BlockStored, self._block_of)] if enabled else None

    def take_events(self) -> list[CacheEvent]:
        """Returns the changes since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    # --- Snapshots

    def save(self) -> tuple[list[int], list[int], dict[int, bytes]]:
        """Returns free blocks, cached blocks, and the hashes of the blocks that can be found, for `restore`."""
        return list(self._free), list(self._cached), dict(self._hash_of)

    def restore(self, free: list[int], cached: list[int], hashes: dict[int, bytes], holders: Counter[int]) -> None:
        """Takes what `save` returned, and the number of holders of each used block. Nobody may watch the cache yet."""
        self._free, self._cached = list(free), OrderedDict.fromkeys(cached)
        self._hash_of, self._block_of = dict(hashes), {each: block for block, each in hashes.items()}
        for block, count in holders.items():
            self._num_holders[block] = count

    def check_integrity(self, holders: Counter[int]) -> None:
        """Asserts that the pool agrees with itself and with `holders`, the number of holders of each used block."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._num_holders) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost, or in two states"
        assert free | cached | used == set(range(1, self.num_blocks + 1)), "a block is lost, or 0 given out"
        assert self.num_used == len(used)
        assert {block: self._num_holders[block] for block in used} == dict(holders), "counts and holders differ"
        assert {block: h for h, block in self._block_of.items()} == self._hash_of, "hashes and blocks differ"
        assert cached <= self._hash_of.keys(), "a cached block has no hash"
        assert not free & self._hash_of.keys(), "a free block can be found"


class HostBlocks:
    """Blocks 0..num_blocks-1 of the workers' swap pool. Each belongs to one sequence."""

    def __init__(self, num_blocks: int) -> None:
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Frees every block: the workers have lost the contents."""
        self.num_blocks = num_blocks
        # Low numbers are taken first.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks. Enough must be free."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """Frees blocks whose content is no longer needed after the plan being made."""
        self._free += reversed(blocks)

    def save(self) -> list[int]:
        """Returns the free blocks, for `restore`."""
        return list(self._free)

    def restore(self, free: list[int]) -> None:
        """Takes what `save` returned; sequences hold the other blocks."""
        self._free = list(free)

    def check_integrity(self, held: list[int]) -> None:
        """Asserts that every block is either free or held by one sequence."""
        assert sorted(self._free + held) == list(range(self.num_blocks)), "a host block is lost, or held twice"


class PrefixCache:
    """Finds and publishes blocks by the hash of their tokens and all tokens before them.

    Blocks are hashed over known tokens only, as soon as a step that computes the last of them is planned. If the cache
    is not enabled, the choices of one group still share the blocks of their prompt, but nothing else is shared.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled

    def scope_of(self, request: GroupRequest) -> bytes:
        """A hash of all that must be equal, besides tokens, for two sequences to share blocks."""
        if self._enabled:
            return scope_of(request.cache_salt)
        return hash_scope(b"group", request.group.to_bytes(8, "little"))

    def reads(self, sequence: Sequence) -> bool:
        """False if the cache is not read for a sequence: nothing can be found, or it needs prompt logprobs."""
        return sequence.may_read_prefix_cache and self._num_shareable(sequence.group) > 0

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix, not held yet. At least one token is left to compute, because the next
        token is sampled from its logits."""
        if not self.reads(sequence):
            return []
        blocks: list[int] = []
        for index in range(min((sequence.num_tokens - 1) // self._block_size, self._num_shareable(sequence.group))):
            block = self._pool.find(self._hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, *sequences: Sequence) -> None:
        """Publishes the blocks that are full of computed, known tokens. The step being planned may be the one that
        computes them: each layer writes all KV before any attention reads it, so reader and writer can share a step."""
        block_size, pool, tells_contents = self._block_size, self._pool, self._pool.tells_contents
        for sequence in sequences:
            first, output = sequence.num_published_blocks, sequence.output_token_ids
            num_prompt = sequence.num_prompt_tokens
            num_full = min(sequence.num_computed_tokens, num_prompt + len(output)) // block_size
            if num_full <= first:
                continue
            hashes, start = sequence.block_hashes, first * block_size - num_prompt
            if start >= 0 and num_full == first + 1 and len(hashes) == first and self._enabled:
                # Fast path, one more block of output: in every step 1 of block_size decodes gets here.
                parent = hashes[-1] if hashes else sequence.group.cache_scope
                block_hash = hash_block(parent, output[start : start + block_size].tobytes())
                hashes.append(block_hash)
                content = self._content(sequence, first) if tells_contents else None
                pool.publish(sequence.block_ids[first], block_hash, content)
                sequence.num_published_blocks = num_full
                continue
            for index in range(first, min(num_full, self._num_shareable(sequence.group))):
                block_hash = self._hash(sequence, index)
                content = self._content(sequence, index) if tells_contents else None
                pool.publish(sequence.block_ids[index], block_hash, content)
                sequence.num_published_blocks = index + 1

    def _num_shareable(self, group: Group) -> int:
        if self._enabled:
            return sys.maxsize
        return group.num_prompt_blocks if group.num_choices > 1 else 0

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of block `index`, which must be full of known tokens."""
        hashes, group = sequence.block_hashes, sequence.group
        while (num_hashed := len(hashes)) <= index:
            if num_hashed < len(group.prompt_block_hashes):
                hashes.append(group.prompt_block_hashes[num_hashed])
                continue
            start = num_hashed * self._block_size
            parent = hashes[-1] if hashes else group.cache_scope
            items = group.items_by_block.get(num_hashed, b"") if group.items_by_block else b""
            hashes.append(hash_block(parent, sequence.token_bytes(start, start + self._block_size), items))
            if num_hashed < group.num_prompt_blocks:
                group.prompt_block_hashes.append(hashes[-1])
        return hashes[index]

    def _content(self, sequence: Sequence, index: int) -> BlockContent:
        """The inputs of the hash of block `index`, which has been computed."""
        request, start = sequence.group.request, index * self._block_size
        end = start + self._block_size
        return BlockContent(
            parent=sequence.block_hashes[index - 1] if index else None,
            token_ids=tuple(array("i", sequence.token_bytes(start, end))),
            cache_salt=request.cache_salt,
            items=tuple(
                (span.name, span.first_token - start) for span in request.items if start <= span.first_token < end
            ),
        )
