"""Finds and publishes full KV blocks by name, so that sequences of equal prefix share them."""

import sys

from runtime.block_names import block_name, scope_named, scope_of
from scheduler.block_pool import BlockPool
from scheduler.messages import GroupRequest
from scheduler.request import Group, Sequence


class PrefixCache:
    """Blocks are named over known tokens only, as soon as a step that computes the last of them is planned.

    If it is not enabled, the choices of one group still share their prompt's blocks, and only they do.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled

    def scope_of(self, request: GroupRequest) -> bytes:
        """What besides tokens must be equal for two sequences to share blocks."""
        if self._enabled:
            return scope_of(request.cache_salt)
        return scope_named(b"group", request.group.to_bytes(8, "little"))

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
        """Publishes the blocks that computed, known tokens fill. They may be computed in the very step being planned:
        each layer writes all KV before any attention reads it, so a reader can share the step with the writer."""
        first, block_size = sequence.num_published_blocks, self._block_size
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // block_size
        if num_full <= first:
            return
        names, start = sequence.block_names, first * block_size - sequence.num_prompt_tokens
        if start >= 0 and num_full == first + 1 and len(names) == first and self._enabled:
            # One more block of output: what 1 of block_size decodes does in every step.
            parent = names[-1] if names else sequence.group.cache_scope
            name = block_name(parent, sequence.output_token_ids[start : start + block_size].tobytes())
            names.append(name)
            self._pool.publish(sequence.block_ids[first], name)
            sequence.num_published_blocks = num_full
            return
        for index in range(first, min(num_full, self._num_nameable(sequence.group))):
            self._pool.publish(sequence.block_ids[index], self._name(sequence, index))
            sequence.num_published_blocks = index + 1

    def _num_nameable(self, group: Group) -> int:
        if self._enabled:
            return sys.maxsize
        return group.num_prompt_blocks if group.num_choices > 1 else 0

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """The name of block `index`, which must be full of known tokens."""
        names, group = sequence.block_names, sequence.group
        while (num_named := len(names)) <= index:
            if num_named < len(group.prompt_block_names):
                names.append(group.prompt_block_names[num_named])
                continue
            start = num_named * self._block_size
            parent = names[-1] if names else group.cache_scope
            names.append(block_name(parent, sequence.token_bytes(start, start + self._block_size)))
            if num_named < group.num_prompt_blocks:
                group.prompt_block_names.append(names[-1])
        return names[index]
