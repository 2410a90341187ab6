"""What goes into the scheduling core and what comes out of it: plain values, no I/O, no clock.

The core (`scheduler.core.Core`) is a deterministic function of these inputs; `now` is always an argument, in seconds.
"""

from dataclasses import dataclass, field
from enum import Enum

# (group, choice); the group number is unique within one core, whatever Session it came by.
SequenceKey = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What bounds and shapes a core. Blocks are numbered 1..num_blocks; 0 is the null block."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_194_304


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

    sequence: a number made for this stay in a row: a sequence that comes back gets another one, so that a late result
    of its earlier stay names nobody. `Core.key_of` tells whose it is.
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
    """One step as a difference. Mirrors step.proto's StepPlan without epoch, step number and digest."""

    freed_rows: list[int] = field(default_factory=list)
    new_rows: list[PlannedRow] = field(default_factory=list)
    # (row, block ids appended to its table)
    grown_rows: list[tuple[int, list[int]]] = field(default_factory=list)
    # (row, tokens computed in this step), in batch order
    scheduled: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.scheduled)


# Not frozen: one is made a token between a result and the next plan, and a frozen one takes 1.3 us to make, not 0.7.
@dataclass(slots=True, kw_only=True)
class Sampled:
    """One token of a step's result. `position` is its output index. `logprobs` is opaque."""

    sequence: int
    position: int
    token_id: int
    logprobs: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    sampled: list[Sampled]
    # Sequences whose logits were not finite.
    failed: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What became of one sequence: tokens, an end, or both."""

    key: SequenceKey
    first_token: int
    token_ids: list[int]
    logprobs: list[object]
    finish_reason: FinishReason | None = None
    # Set if one of the request's own stop_token_ids ended it.
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """A sequence lost its blocks to others for want of KV cache; it waits and is computed again from its tokens."""

    key: SequenceKey
    request_id: str
    # Preemptions of this core so far, this one included.
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """num_running and num_waiting count sequences; num_free_blocks those that can be taken at once, free or cached;
    num_queued_tokens the prompt tokens of groups that have never run."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_queued_tokens: int


@dataclass(slots=True, kw_only=True)
class CoreStats:
    """Cumulative counts since the core was made."""

    # For want of blocks; those that follow a loss of workers are not counted.
    num_preemptions: int = 0
    # Of groups that have begun to run.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # Tokens looked up in the prefix cache, and found there, when a sequence first ran.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_steps: int = 0
