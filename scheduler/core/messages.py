"""Inputs and outputs of the scheduling core: plain values, no I/O, no clock.

The core (`scheduler.core.core.Core`) is a deterministic function of these inputs; `now` is an argument, in seconds.
Columns are numpy arrays, so that a step costs little more for a thousand sequences than for one.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

# Below every priority that a request can have, and so refused whatever it has.
ANY_PRIORITY = -(2**31)

# (group, choice); the group number is unique within one core, whatever Session it came by.
SequenceKey = tuple[int, int]


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
    # False: prefills go first, whole, and never share a step with decodes.
    enable_chunked_prefill: bool = True
    # Prefills longer than this get chunks of at most so many tokens. 0: no bound.
    long_prefill_token_threshold: int = 0
    # Prefills that one step may leave unfinished, and how many of them may be long.
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    # recompute, or swap, for which the workers hold so many host blocks, numbered from 0.
    preemption_mode: str = "recompute"
    num_swap_blocks: int = 0
    # Who loses its blocks and when it may come back: scheduler.core.policies.
    preemption_policy: str = "whole_context"
    # Plans whose results are outstanding at most.
    max_steps_in_flight: int = 1
    # Of the pipeline. With more than one a sequence is in one step in flight at most.
    num_stages: int = 1
    # Draft tokens that a sequence may have in one step.
    num_speculative_tokens: int = 0
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_194_304
    # Finished requests whose timelines are kept for `explain`.
    max_finished_timelines: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a sequence ends, as far as token ids tell. Counts of output tokens include resumed ones."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStart:
    choice: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One request: a prompt and its unfinished choices. `sampling` is opaque to the core; plans carry it to workers."""

    group: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    stop: StopRules
    sampling: object = None
    # Prompt logprobs are wanted: the prefix cache is not read for the first choice.
    bypass_prefix_cache: bool = False
    priority: int = 0
    cache_salt: str = ""
    # Absolute, on the clock of `now`; None: none.
    deadline: float | None = None


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
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """A sequence that takes a row in this step (a new one, or one that comes back). Mirrors step.proto's NewRow.

    sequence: its row generation: a sequence that comes back gets another one, so that a late result of the earlier one
    finds nobody. `Core.key_of` tells which sequence has it.
    """

    row: int
    sequence: int
    token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int
    block_ids: list[int]
    choice: int
    sampling: object


@dataclass(slots=True, kw_only=True)
class Plan:
    """One step as a difference. Mirrors step.proto's StepPlan without epoch and digest; applied in this order."""

    # Grows by one from 1 since the core was made or last lost its workers.
    step: int
    freed_rows: list[int] = field(default_factory=list)
    # (block, host block) copied out, then (host block, block) copied in, before anything is computed.
    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)
    new_rows: list[PlannedRow] = field(default_factory=list)
    # (row, leading blocks that its table keeps): look-ahead blocks given back.
    trimmed_rows: list[tuple[int, int]] = field(default_factory=list)
    # Row grown_rows[i] gets the next num_new_blocks[i] of new_blocks appended to its table.
    grown_rows: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    # uint16 [rows]: each computes one token, its last, and samples the next. First in the batch.
    decode_rows: np.ndarray
    # (row, tokens computed in this step), in batch order, after the decodes: prefills, and rows with drafts.
    chunks: list[tuple[int, int]] = field(default_factory=list)
    # (row, draft tokens): the last of that row's tokens in `chunks`.
    drafts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(count for _, count in self.chunks)


@dataclass(slots=True, kw_only=True)
class Result:
    """The workers' result for one plan. Columns: one entry a sequence that sampled, in the plan's batch order."""

    step: int
    # int64: PlannedRow.sequence.
    sequences: np.ndarray
    # int32: output index of the first token.
    positions: np.ndarray
    # int32: tokens of each, 1 + accepted drafts; None: one each.
    num_tokens: np.ndarray | None = None
    # int32 [sum of num_tokens].
    token_ids: np.ndarray
    # By sequence, one opaque entry a token, for those that asked.
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    # By sequence: what to try after these tokens, num_speculative_tokens at most.
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Sequences whose logits were not finite; they are not among the columns.
    failed: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class SequenceEnd:
    """The end of one sequence. No output mentions it again."""

    key: SequenceKey
    reason: FinishReason
    # Set if one of the request's own stop_token_ids ended it.
    stop_token_id: int | None = None
    # Prompt tokens found in the prefix cache when it first ran.
    num_cached_tokens: int = 0
    # For ERROR: the cause.
    message: str = ""


@dataclass(slots=True, kw_only=True)
class StepOutputs:
    """Tokens and ends of a step. Columns: one entry a sequence that got tokens; an end comes after its last tokens."""

    # int64 and int32: the sequence's key.
    groups: np.ndarray
    choices: np.ndarray
    # int32: output position of the first token, and number of tokens; None: one each.
    first_tokens: np.ndarray
    num_tokens: np.ndarray | None = None
    # int32 [sum of num_tokens].
    token_ids: np.ndarray
    # By index into the columns, one opaque entry a token.
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    ends: list[SequenceEnd] = field(default_factory=list)


class PreemptionReason(Enum):
    # Others needed its blocks.
    NO_BLOCKS = "no_blocks"
    # Its epoch of workers ended.
    WORKERS_LOST = "workers_lost"
    # Another one is computed alone, to find out whether workers fail because of it.
    SET_ASIDE = "set_aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """A sequence lost its blocks to others for want of KV cache, and waits to come back."""

    key: SequenceKey
    request_id: str
    # Its blocks went to host memory; otherwise it is computed again from its tokens.
    swapped: bool = False
    # Preemptions of this core so far, this one included.
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """num_running and num_waiting count sequences; num_free_blocks those that can be taken at once, free or cached;
    num_queued_tokens the prompt tokens of groups that have never run; num_prefill_tokens what those that run have yet
    to compute before their next token, steps in flight included. refused_priority: while the queue is full, requests of
    this priority or a number above it are refused; None: it is not full."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_queued_tokens: int
    num_prefill_tokens: int = 0
    num_free_swap_blocks: int = 0
    refused_priority: int | None = None


@dataclass(slots=True, kw_only=True)
class CoreStats:
    """Cumulative counts since the core was made."""

    # For want of blocks; those that follow a loss of workers are not counted.
    num_preemptions: int = 0
    # Of those, by swap; and the blocks that went out and came back in.
    num_swaps: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    # Of groups that have begun to run.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # Tokens looked up in the prefix cache, and found there, when a sequence first ran.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    # Draft tokens planned, and accepted.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    # Empty steps, run because another replica has work (lockstep).
    num_empty_steps: int = 0


@dataclass(frozen=True, slots=True)
class BlockStored:
    """From now on others find a full block by this hash (runtime.block_hashes)."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """It is not found any more."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing stored before can be found any more."""


CacheEvent = BlockStored | BlockRemoved | CacheCleared


class Moment(Enum):
    """Events in the life of a sequence."""

    QUEUED = "queued"
    # It got a row for the first time.
    ADMITTED = "admitted"
    # A step computes the rest of its prompt, or of what it has to compute again.
    SCHEDULED = "scheduled"
    # A step computes a part of it.
    CHUNKED = "chunked"
    # The step that computed the rest has returned, with a token: from now on it decodes.
    DECODING = "decoding"
    PREEMPTED = "preempted"
    # It got a row again.
    RESUMED = "resumed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    moment: Moment
    # On the clock of `now`.
    time: float
    choice: int
    # The step planned then; 0 outside of steps.
    step: int = 0
    # Tokens: of the prompt when queued, found in the prefix cache when admitted or resumed, computed by this step when
    # scheduled or chunked, lost when preempted, of the output when finished.
    num_tokens: int = 0
    # Why: of a preemption or an end.
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    request_id: str
    entries: tuple[TimelineEntry, ...]
    # Entries dropped from the middle of a very long one.
    num_dropped: int = 0
    is_finished: bool = False
