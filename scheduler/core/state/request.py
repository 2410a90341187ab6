"""A request in the core: a group and its sequences, with their status."""

from array import array
from enum import Enum

from runtime.block_hashes import items_by_block, token_bytes
from scheduler.core.messages import ChoiceStart, FinishReason, GroupRequest, SequenceEnd, SequenceKey
from scheduler.core.state.endings import RepetitionWatch

# Sorts sequences for running, waiting and preemption: the policy's order of the group, then the choice's index in it.
Order = tuple[float, int, int]


_NO_ITEMS: dict[int, bytes] = {}


class ItemInput(Enum):
    """The state of the encoder's input for an item, in the workers."""

    ABSENT = "absent"
    # The workers have been asked to prepare it.
    ASKED = "asked"
    PREPARED = "prepared"


class Item:
    """An item of live groups, or one whose embeddings the workers keep."""

    __slots__ = (
        "input",
        "is_cached",
        "name",
        "num_embeddings",
        "num_groups",
        "num_holders",
        "num_needing",
        "number",
    )

    def __init__(self, number: int, name: bytes, num_embeddings: int) -> None:
        self.number, self.name, self.num_embeddings = number, name, num_embeddings
        # Live groups that have it, counted once for each of their spans.
        self.num_groups = 0
        # Spans of sequences that may still need it encoded: the workers keep its input as long.
        self.num_needing = 0
        # Spans of sequences that need its embeddings to stay.
        self.num_holders = 0
        # The embeddings are in the workers' cache, or will be with the plan being made.
        self.is_cached = False
        self.input = ItemInput.ABSENT

    @property
    def key(self) -> tuple[bytes, int]:
        return self.name, self.num_embeddings


class SequenceStatus(Enum):
    # Has never run.
    WAITING = "waiting"
    # Holds a row and blocks.
    RUNNING = "running"
    # Has run and lost its row and blocks; comes back when its whole context fits.
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Group:
    """One request: a prompt, its unfinished choices, and what they share."""

    __slots__ = (
        "cache_scope",
        "end_token_ids",
        "items",
        "items_by_block",
        "num_choices",
        "num_prompt_blocks",
        "num_prompt_tokens",
        "prompt_block_hashes",
        "prompt_token_bytes",
        "request",
        "sequences",
    )

    def __init__(
        self, request: GroupRequest, *, eos_token_ids: frozenset[int], block_size: int, cache_scope: bytes
    ) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        # Blocks that the prompt fills: choices can share them.
        self.num_prompt_blocks = self.num_prompt_tokens // block_size
        self.num_choices = len(request.choices)
        stop = request.stop
        self.end_token_ids = stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids | eos_token_ids
        self.sequences: dict[int, Sequence] = {}  # the live ones, by choice
        self.cache_scope = cache_scope
        self.prompt_token_bytes = token_bytes(request.prompt_token_ids)
        self.prompt_block_hashes: list[bytes] = []
        # The items of the prompt, one for each span of the request. `Items.add` sets them.
        self.items: tuple[Item, ...] = ()
        # For hashes: items by the block in which they start.
        self.items_by_block = (
            items_by_block(((span.first_token, span.name) for span in request.items), block_size)
            if request.items
            else _NO_ITEMS
        )

    @property
    def number(self) -> int:
        return self.request.group

    @property
    def is_computing_prompt(self) -> bool:
        """True if one of its choices computes the prompt now, and the others could share its blocks."""
        if self.num_choices == 1 or not self.num_prompt_blocks:
            return False
        return any(
            sequence.status is SequenceStatus.RUNNING
            and not sequence.is_decoding
            and sequence.num_computed_tokens < self.num_prompt_tokens
            for sequence in self.sequences.values()
        )


class Sequence:
    """One choice of a group. Its KV is valid for num_computed_tokens, which each step lets catch up with num_tokens.

    While `Decodes` holds it, num_computed_tokens and output_token_ids lag behind; `Decodes.settle` updates them.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "choice",
        "drafts",
        "end_token_ids",
        "generation",
        "group",
        "holds_item",
        "host_blocks",
        "is_decoding",
        "key",
        "last_step",
        "max_tokens",
        "next_item",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_swapped_tokens",
        "num_tokens_when_preempted",
        "order",
        "output_token_ids",
        "repetition",
        "row",
        "status",
    )

    def __init__(self, group: Group, start: ChoiceStart, order: Order) -> None:
        self.group = group
        self.choice = start.choice
        self.key: SequenceKey = (group.number, start.choice)
        self.order = order
        self.status = SequenceStatus.WAITING
        self.num_prompt_tokens = group.num_prompt_tokens
        self.output_token_ids = array("i", start.output_token_ids)
        # Copies of two stop rules, for fast access in a step.
        self.end_token_ids = group.end_token_ids
        self.max_tokens = group.request.stop.max_tokens
        rule = group.request.stop.repetition
        self.repetition = None if rule is None else RepetitionWatch(rule)
        # Counts the tokens of steps in flight as computed.
        self.num_computed_tokens = 0
        # Prompt tokens found in the prefix cache when it first ran.
        self.num_cached_tokens = 0
        self.block_ids: list[int] = []
        # Number of leading blocks that the prefix cache can find, as this sequence's block or an equal one.
        self.num_published_blocks = 0
        self.block_hashes: list[bytes] = []
        # Host blocks that hold the KV of a swapped sequence while it waits, and the number of tokens in them.
        self.host_blocks: list[int] = []
        self.num_swapped_tokens = 0
        # num_tokens when it was last preempted for lack of blocks; -1: never.
        self.num_tokens_when_preempted = -1
        # Row and generation are -1 when not running. A returning sequence gets a new generation, so that a late result
        # matches nothing. last_step: the last step that computes it; not updated while it decodes.
        self.row = -1
        self.generation = -1
        self.last_step = 0
        self.is_decoding = False
        # Draft tokens verified, and those of them that were accepted.
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        # Forced tokens to try after the known tokens.
        self.drafts: tuple[int, ...] = ()
        # The first item of the group whose tokens are not all computed, and True if its embeddings are held.
        self.next_item = 0
        self.holds_item = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def max_num_tokens_with_kv(self) -> int:
        """The maximum number of tokens that need KV. The very last token is sampled but never computed."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def may_read_prefix_cache(self) -> bool:
        """False for the first choice of a group that wants prompt logprobs, until its prompt has been computed."""
        request = self.group.request
        return not (
            request.bypass_prefix_cache and self.choice == request.choices[0].choice and not self.output_token_ids
        )

    def token_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Prompt and output token ids at positions start to stop (default: all), as a new list."""
        stop = self.num_tokens if stop is None else stop
        num_prompt_tokens = self.num_prompt_tokens
        token_ids = list(self.group.request.prompt_token_ids[start:stop])
        if stop > num_prompt_tokens:
            token_ids += self.output_token_ids[max(start - num_prompt_tokens, 0) : stop - num_prompt_tokens]
        return token_ids

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Token ids at positions start to stop, as little-endian int32."""
        num_prompt_tokens = self.num_prompt_tokens
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : stop - num_prompt_tokens].tobytes()
        ids = self.group.prompt_token_bytes[4 * start : 4 * stop]
        if stop > num_prompt_tokens:
            ids += self.output_token_ids[: stop - num_prompt_tokens].tobytes()
        return ids

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """The finish reason if the last output token ends the sequence, with that token's id if it is one of the
        request's own stop tokens.

        Admission keeps prompt + max_tokens within max_model_len, so checking max_tokens is enough.
        """
        stop, num_output_tokens = self.group.request.stop, len(self.output_token_ids)
        if num_output_tokens and num_output_tokens >= stop.min_tokens:
            last = self.output_token_ids[-1]
            if last in self.end_token_ids:
                is_eos = last not in stop.stop_token_ids
                return FinishReason.STOP, None if is_eos else last
        if num_output_tokens >= stop.max_tokens:
            return FinishReason.LENGTH, None
        if self.repetition is not None and num_output_tokens >= stop.min_tokens:
            return (FinishReason.REPETITION, None) if self.repetition.is_repeating(self.output_token_ids) else None
        return None

    def end(
        self, reason: FinishReason, stop_token_id: int | None = None, *, message: str = "", no_token: bool = False
    ) -> SequenceEnd:
        """The end that the core reports to its callers."""
        return SequenceEnd(
            key=self.key,
            reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=self.num_cached_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            message=message,
            no_token=no_token,
        )

    def start(self, *, row: int, generation: int, block_ids: list[int], num_computed_tokens: int) -> None:
        assert self.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        self.status = SequenceStatus.RUNNING
        self.row, self.generation = row, generation
        self.block_ids, self.num_computed_tokens = block_ids, num_computed_tokens

    def preempt(self) -> None:
        """Marks a running sequence as preempted. The caller has already released its row and blocks."""
        assert self.status is SequenceStatus.RUNNING
        self.status = SequenceStatus.PREEMPTED
        self._leave_row()

    def finish(self) -> None:
        """Marks the sequence as finished. The caller has already released its row and blocks."""
        assert self.status is not SequenceStatus.FINISHED
        self.status = SequenceStatus.FINISHED
        self._leave_row()

    def _leave_row(self) -> None:
        self.row = self.generation = -1
        self.block_ids = []
        self.drafts = ()
        self.last_step = self.num_computed_tokens = self.num_published_blocks = 0
