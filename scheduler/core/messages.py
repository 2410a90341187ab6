"""Inputs and outputs of the scheduling core: plain values, no I/O, no clock.

The core (`scheduler.core.core.Core`) is a deterministic function of these inputs; `now` is an argument, in seconds.
Columns are numpy arrays, so that a step costs little more for a thousand sequences than for one.
Longer than 400 lines because the messages of the core, with their invariants, are read as one page.
"""

from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import numpy as np

# Smaller than any request's priority number: as `CoreLoad.refused_priority` it means that all requests are refused.
ANY_PRIORITY = -(2**31)

# (group, choice); the group number is unique within one core, across Sessions.
SequenceKey = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How sequences get drafts; the fields of configs.groups.speculation.SpeculativeConfig that the core needs."""

    num_speculative_tokens: int = 8
    # Drafters of the core, in the order in which ties are decided: ngram, suffix.
    drafters: tuple[str, ...] = ()
    # The workers have a drafter: plans say for which rows it drafts, and how many. It may lack KV until it is asked.
    workers_draft: bool = False
    workers_catch_up: bool = False
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    # Outputs of a tenant (and cache_salt) that its later requests draft from. 0: none.
    max_cached_outputs: int = 0


# Until it is measured: benchmarks/scheduler/drafts.py prints 0.2 to 0.6 ms, and it is more in a running engine.
FIRST_CHOOSING_SECONDS = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The seconds that steps have taken lately, by their tokens; linear in between. They decide how many drafts pay."""

    # Increasing; the first is 1.
    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    # The seconds of one more draft of n rows by the workers' drafter, for n as above. Empty: they have none.
    draft_seconds: tuple[float, ...] = ()
    # The seconds in which that drafter computes one more token of a text that it lacks; 0: not measured yet.
    catch_up_seconds: float = 0.0
    # The seconds that the scheduler takes more for a step with drafts, whatever their number.
    choosing_seconds: float = FIRST_CHOOSING_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Bounds and policies of a core. Blocks are numbered 1..num_blocks; 0 is the null block."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    # fcfs, priority or deadline: scheduler.core.policies.
    scheduling_policy: str = "fcfs"
    # Under `priority`: seconds of waiting that count as one priority number. 0: waiting does not count.
    priority_aging: float = 0.0
    # False: prefills go first, whole, and never share a step with decodes.
    enable_chunked_prefill: bool = True
    # Prefills longer than this are cut into chunks of at most this many tokens. 0: no bound.
    long_prefill_token_threshold: int = 0
    # Prefills that one step may leave unfinished, and how many of them may be long.
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    # While something decodes, prefills are cut so that a step takes at most this many seconds: scheduler.core.pacing.
    # 0: no target. Each step computes least_prefill_tokens, if prefills have as many, whatever they take.
    inter_token_latency_target: float = 0.0
    least_prefill_tokens: int = 32
    # recompute or swap; for swap, the workers hold num_swap_blocks host blocks, numbered from 0.
    preemption_mode: str = "recompute"
    num_swap_blocks: int = 0
    # Decides which sequence loses its blocks and when it may come back: scheduler.core.policies.
    preemption_policy: str = "whole_context"
    # Upper bound of plans whose results are outstanding.
    max_steps_in_flight: int = 1
    # Pipeline stages. With more than one, a sequence is in at most one step in flight.
    num_stages: int = 1
    # True if a sequence with a constraint is in at most one step in flight; others are not held back.
    holds_constrained: bool = False
    # None: no drafts but forced tokens, of a sequence with a constraint at most max_forced_tokens in one step.
    speculation: Speculation | None = None
    max_forced_tokens: int = 16
    # Layers carry a state from token to token, which workers keep as it is after a block's last token: what a sequence
    # finds again is cut to whole blocks.
    carries_states: bool = False
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_194_304
    # Embeddings of items that the workers keep; 0: they take no items. Those that one step encodes, except that one
    # item alone may have more.
    encoder_cache_size: int = 0
    max_num_encoder_input_tokens: int = 0
    # Number of finished requests whose timelines are kept for `explain`.
    max_finished_timelines: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionRule:
    """An output ends if it ends with a pattern of so many tokens, at least min_count (2 or more) times in a row."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """The rules by which token ids end a sequence. Counts of output tokens include resumed ones."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    repetition: RepetitionRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStart:
    choice: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSpan:
    """The tokens of a prompt that stand for an item. Mirrors inference.proto's ItemSpan."""

    # 32 bytes; items of one name have equal embeddings.
    name: bytes
    first_token: int
    num_tokens: int
    num_embeddings: int
    grid: tuple[int, ...] = ()
    time_step: float = 0.0

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.first_token + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One request: a prompt and its unfinished choices. `sampling` is opaque to the core; plans carry it to workers."""

    group: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    stop: StopRules
    sampling: object = None
    # Set when prompt logprobs are wanted: the first choice then does not read the prefix cache.
    bypass_prefix_cache: bool = False
    priority: int = 0
    cache_salt: str = ""
    # Absolute time on the clock of `now`; None: no deadline.
    deadline: float | None = None
    # Tenants share the workers and the queue by weight. Empty: there are no tenants, and no shares.
    tenant: str = ""
    weight: float = 1.0
    # The workers mask its tokens, and propose drafts where only one token is possible.
    is_constrained: bool = False
    # Upper bound of its drafts in one step; None: the settings' own.
    max_drafts: int | None = None
    # In the order of their tokens, which do not overlap.
    items: tuple[ItemSpan, ...] = ()


class RejectReason(Enum):
    INVALID = "invalid"
    QUEUE_FULL = "queue_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    reason: RejectReason
    # Names the field, the value seen and what would work.
    message: str


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """A sequence, new or returning, that takes a row in this step. Mirrors step.proto's NewRow.

    sequence: the row generation. A returning sequence gets a new one, so that a late result for the old one matches
    nothing. `Core.key_of` maps it to the sequence.
    """

    row: int
    sequence: int
    token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int
    block_ids: list[int]
    choice: int
    sampling: object
    # (its number, the tokens that stand for it), for each item of the prompt.
    items: list[tuple[int, ItemSpan]] = field(default_factory=list)


NO_ROWS, NO_INTS = np.zeros(0, np.uint16), np.zeros(0, np.int32)


@dataclass(slots=True, kw_only=True)
class Plan:
    """One step as a difference. Mirrors step.proto's StepPlan without epoch and digest; applied in this order."""

    # Counts from 1 since the core was made or last lost its workers.
    step: int
    freed_rows: list[int] = field(default_factory=list)
    # (block, host block) copied out, then (host block, block) copied in, before anything is computed.
    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)
    new_rows: list[PlannedRow] = field(default_factory=list)
    # (row, number of leading blocks that its table keeps): the look-ahead blocks after them are freed.
    trimmed_rows: list[tuple[int, int]] = field(default_factory=list)
    # Row grown_rows[i] gets the next num_new_blocks[i] of new_blocks appended to its table.
    grown_rows: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    # uint16 [rows]: each row computes one token, its last, and samples the next. They come first in the batch.
    decode_rows: np.ndarray
    # uint16: rows that compute their last token and num_drafts[i] drafts after it (int32, at least 1), the next ones of
    # draft_token_ids (int32). They come after the decodes.
    rows_with_drafts: np.ndarray = field(default_factory=lambda: NO_ROWS)
    num_drafts: np.ndarray = field(default_factory=lambda: NO_INTS)
    draft_token_ids: np.ndarray = field(default_factory=lambda: NO_INTS)
    # (row, tokens computed in this step) of the prefills, which come last in the batch.
    chunks: list[tuple[int, int]] = field(default_factory=list)
    # (row that samples, number of drafts that the workers' drafter proposes after its tokens).
    wanted_drafts: list[tuple[int, int]] = field(default_factory=list)
    # The number of tokens of these rows that the drafter lacks and computes first; None: not known, because a row got
    # no drafts when it was last asked for some. Not sent: the workers know.
    num_catching_up: int | None = 0
    # Numbers of items, in this order: those whose embeddings leave the workers' cache; those whose input is not needed
    # any more; those that are encoded before anything is computed.
    dropped_items: list[int] = field(default_factory=list)
    forgotten_items: list[int] = field(default_factory=list)
    encoded_items: list[int] = field(default_factory=list)
    # Tokens whose KV the step reads: for each sequence in it, its tokens up to the last one computed. Not sent.
    num_context_tokens: int = 0
    # Seconds that the step should take, if inter_token_latency_target limits its prefills; else 0. Not sent.
    predicted_seconds: float = 0.0
    # Counted once, as each step asks for them ten times: the rows that decode, with drafts or without; the tokens of
    # chunks; all tokens.
    num_decodes: int = field(init=False)
    num_prefill_tokens: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_decodes = len(self.decode_rows) + len(self.rows_with_drafts)
        self.num_prefill_tokens = sum([count for _, count in self.chunks]) if self.chunks else 0
        self.num_tokens = self.num_decodes + len(self.draft_token_ids) + self.num_prefill_tokens

    @property
    def batch(self) -> list[tuple[int, int]]:
        """(row, tokens computed in this step) of all rows, in batch order."""
        drafting = zip(self.rows_with_drafts.tolist(), (1 + self.num_drafts).tolist(), strict=True)
        return [*((row, 1) for row in self.decode_rows.tolist()), *drafting, *self.chunks]

    @property
    def has_drafts(self) -> bool:
        return len(self.rows_with_drafts) > 0

    @property
    def drafts(self) -> list[tuple[int, tuple[int, ...]]]:
        """(row, draft tokens) of the rows that have drafts, in batch order."""
        token_ids = iter(self.draft_token_ids.tolist())
        return [
            (row, tuple(islice(token_ids, count)))
            for row, count in zip(self.rows_with_drafts.tolist(), self.num_drafts.tolist(), strict=True)
        ]


@dataclass(slots=True, kw_only=True)
class Result:
    """The workers' result for one plan. Columns have one entry per sequence that sampled, in the plan's batch order."""

    step: int
    # int64: PlannedRow.sequence.
    sequences: np.ndarray
    # int32: output index of the first token.
    positions: np.ndarray
    # int32: number of tokens, 1 + accepted drafts; None: one each.
    num_tokens: np.ndarray | None = None
    # int32 [sum of num_tokens].
    token_ids: np.ndarray
    # By sequence, one opaque entry per token; only for sequences that asked for logprobs.
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    # By sequence: draft tokens to try after these. Those of one with a constraint are forced.
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Sequences whose logits were not finite, or that had no token left; the columns have only the tokens before that.
    failed: frozenset[int] = frozenset()
    # By sequence: why it had no token left.
    why_failed: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SequenceEnd:
    """The end of one sequence. No output mentions it again."""

    key: SequenceKey
    reason: FinishReason
    # Set if one of the request's own stop_token_ids ended it.
    stop_token_id: int | None = None
    # Prompt tokens found in the prefix cache when it first ran.
    num_cached_tokens: int = 0
    # Without forced tokens.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # For ERROR: the cause. no_token: its constraint and bans left no token.
    message: str = ""
    no_token: bool = False
    # For ERROR: the request is to blame, and nothing of its group was computed. All sequences of the group end so.
    is_invalid: bool = False


@dataclass(slots=True, kw_only=True)
class StepOutputs:
    """Tokens and ends of a step. Columns have one entry per sequence that got tokens; its end applies after them."""

    # int64 and int32: the sequence's key.
    groups: np.ndarray
    choices: np.ndarray
    # int32: output position of the first token, and number of tokens; None: one each.
    first_tokens: np.ndarray
    num_tokens: np.ndarray | None = None
    # int32 [sum of num_tokens].
    token_ids: np.ndarray
    # By index into the columns, one opaque entry per token.
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    ends: list[SequenceEnd] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedItem:
    """An item that the workers are to prepare: `Core.item_prepared` or `Core.item_failed` says when they have."""

    # Names the item in plans; of no other item in this epoch.
    number: int
    name: bytes
    num_embeddings: int


class PreemptionReason(Enum):
    # Other sequences needed its blocks.
    NO_BLOCKS = "no_blocks"
    # The workers' epoch ended.
    WORKERS_LOST = "workers_lost"
    # Another group is computed alone, to find out if it makes the workers fail.
    SET_ASIDE = "set_aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """A sequence that lost its blocks to others for lack of KV cache, and waits to come back."""

    key: SequenceKey
    request_id: str
    # True: its blocks went to host memory. False: it is computed again from its tokens.
    swapped: bool = False
    # Preemptions in this core so far, including this one.
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """The load of a core.

    num_running and num_waiting count sequences. num_free_blocks: blocks that can be taken at once, free or cached.
    num_queued_tokens: prompt tokens of groups that have never run. num_prefill_tokens: tokens that running sequences
    must compute before their next output token, including those in steps in flight. refused_priority: the queue is
    full, and refuses requests with this priority number or a larger one; None: it is not full. refused_tenants: the
    same for each tenant that has used up its share of the queue.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_queued_tokens: int
    num_prefill_tokens: int = 0
    num_free_swap_blocks: int = 0
    refused_priority: int | None = None
    refused_tenants: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class CoreStats:
    """Cumulative counts since the core was made."""

    # For lack of blocks only: preemptions after a loss of workers are not counted.
    num_preemptions: int = 0
    # The swaps among those preemptions, and the blocks swapped out and in.
    num_swaps: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    # Counted when a group first runs.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # Tokens looked up and found in the prefix cache when sequences first ran.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    # Draft tokens planned and accepted, forced ones included.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    # Empty steps, run because another replica has work (lockstep).
    num_empty_steps: int = 0
    # Items that a prefill needed, those of them whose embeddings were in the cache, and the embeddings encoded.
    num_item_queries: int = 0
    num_item_hits: int = 0
    num_encoded_embeddings: int = 0
    # Without forced tokens: times that a sequence had drafts, their tokens, and the accepted ones by place in a step.
    num_drafts: int = 0
    num_speculated_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    # Steps whose prefills inter_token_latency_target limited, those that took longer than it allows all the same, and
    # the seconds that all of them were to take and took.
    num_limited_steps: int = 0
    num_late_steps: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockContent:
    """The inputs of a block's hash.

    parent: the hash of the block before it; None for a sequence's first block. items: name and first token, counted in
    the block, of those that start in it.
    """

    parent: bytes | None
    token_ids: tuple[int, ...]
    cache_salt: str
    items: tuple[tuple[bytes, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block can be found by this hash from now on (runtime.block_hashes). content: None unless it was asked for,
    and for blocks that could be found before that."""

    block_hash: bytes
    content: BlockContent | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The block can no longer be found."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block stored before can be found any more."""


CacheEvent = BlockStored | BlockRemoved | CacheCleared


class Moment(Enum):
    """Events in the life of a sequence."""

    QUEUED = "queued"
    # The sequence got a row for the first time.
    ADMITTED = "admitted"
    # A step computes the rest of its prefill: the prompt, or all tokens when it recomputes.
    SCHEDULED = "scheduled"
    # A step computes a chunk of its prefill.
    CHUNKED = "chunked"
    # The step that completed the prefill has returned a token: the sequence decodes from now on.
    DECODING = "decoding"
    PREEMPTED = "preempted"
    # The sequence got a row again.
    RESUMED = "resumed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    moment: Moment
    # Seconds on the clock of `now`.
    time: float
    choice: int
    # The step of this event; 0 if it is not part of one.
    step: int = 0
    # Depends on the moment. QUEUED: prompt tokens; ADMITTED, RESUMED: tokens found in the prefix cache or host blocks;
    # SCHEDULED, CHUNKED: tokens computed by this step; PREEMPTED: tokens lost; FINISHED: output tokens.
    num_tokens: int = 0
    # The reason for a preemption or an end.
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    request_id: str
    entries: tuple[TimelineEntry, ...]
    # Entries dropped from the middle of a very long timeline.
    num_dropped: int = 0
    is_finished: bool = False
    # Speculation of the choices that have finished: drafts, and those of them that were accepted.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
