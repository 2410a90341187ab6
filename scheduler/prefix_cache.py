"""Names the content of full KV blocks, so that sequences of equal prefix share them.

A block's name is the sha256 of tagged, length-prefixed fields: the name of the block before it, the scope, and its
token ids. So equal names mean equal prefixes, and no choice of tokens or salt makes one scope reach another's blocks.
"""

import hashlib
import struct
import sys

from scheduler.block_pool import BlockPool
from scheduler.messages import GroupRequest
from scheduler.request import Group, Sequence


def _field(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


_TAG = _field(b"octavo.kv-block.v1")


class PrefixCache:
    """Finds and publishes blocks by content, over tokens known when they are scheduled.

    If it is not enabled, the choices of one group still share their prompt's blocks, and only they do.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled
        self._tokens = struct.Struct(f"<I{block_size}I")

    def scope_of(self, request: GroupRequest) -> bytes:
        """What besides tokens must be equal for two sequences to share blocks."""
        if self._enabled:
            return _field(b"salt") + _field(request.cache_salt.encode())
        return _field(b"group") + _field(struct.pack("<Q", request.group))

    def reads(self, sequence: Sequence) -> bool:
        """False if nothing is looked up for it: nothing could be found, or it computes all its prompt for logprobs."""
        return sequence.may_read_prefix_cache and self._num_nameable(sequence.group) > 0

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix, not held yet. At least one token is left to compute: the next one is
        sampled from its logits."""
        if not self.reads(sequence):
            return []
        blocks: list[int] = []
        for index in range(min((sequence.num_tokens - 1) // self._block_size, self._num_nameable(sequence.group))):
            block = self._pool.find(self._name(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Publishes the blocks that num_computed_tokens fills. They may be computed in the very step being planned:
        each layer writes all KV before any attention reads it, so a reader can share the step with the writer."""
        num_full = min(sequence.num_computed_tokens // self._block_size, self._num_nameable(sequence.group))
        for index in range(sequence.num_published_blocks, num_full):
            self._pool.publish(sequence.block_ids[index], self._name(sequence, index))
            sequence.num_published_blocks = index + 1

    def _num_nameable(self, group: Group) -> int:
        if self._enabled:
            return sys.maxsize
        return group.num_prompt_blocks if group.num_choices > 1 else 0

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """The name of block `index`, which must be full of known tokens."""
        names, group = sequence.block_hashes, sequence.group
        while len(names) <= index:
            if len(names) < len(group.prompt_hashes):
                names.append(group.prompt_hashes[len(names)])
                continue
            start = len(names) * self._block_size
            token_ids = sequence.token_ids(start, start + self._block_size)
            fields = (
                _TAG
                + _field(names[-1] if names else b"")
                + group.cache_scope
                + self._tokens.pack(4 * self._block_size, *token_ids)
            )
            names.append(hashlib.sha256(fields).digest())
            if len(names) <= group.num_prompt_blocks:
                group.prompt_hashes.append(names[-1])
        return names[index]
