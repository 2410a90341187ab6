"""Options of scheduling: the size of a step, the order of requests, and how many may wait."""

from typing import Literal

from pydantic import BaseModel

from configs.groups.field import SCHEDULING, option
from configs.groups.parallel import MOST_STEPS_IN_FLIGHT, default_steps_in_flight
from configs.sampling import MAX_LOGPROBS, MOST_LOGPROBS

# A worker's result is at most 64 MiB (runtime.wire.STEP_MESSAGE_BYTES), and a logprob takes 19 bytes of it.
_RESULT_BYTES, _LOGPROB_BYTES = 60 * 2**20, 20


class SchedulingOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    max_num_seqs: int = option(SCHEDULING, 256, "Sequences that run at once in one replica.", ge=1, le=65_536)
    max_num_batched_tokens: int = option(
        SCHEDULING,
        2048,
        "Token budget of one step. Decodes come first; what is left goes to prefills, the last of which is chunked.",
        ge=1,
        le=1_048_576,
    )
    max_logprobs: int = option(
        SCHEDULING,
        MAX_LOGPROBS,
        "Most likely tokens that a request may have the logprobs of, at each position of its output or prompt. All "
        "tokens of the vocabulary, -1 in a request, are allowed if they are no more than that.",
        ge=1,
        le=MOST_LOGPROBS,
    )
    enable_chunked_prefill: bool = option(
        SCHEDULING,
        True,
        "Split prefills to fill what decodes leave of a step. Off: prefills go first, whole, in steps without decodes, "
        "and a prompt longer than max_num_batched_tokens is refused.",
    )
    long_prefill_token_threshold: int = option(
        SCHEDULING,
        0,
        "A prefill with more tokens than this is long, and gets at most this many tokens per step. 0: no bound, or 4% "
        "of max_model_len if max_num_partial_prefills is above 1.",
        ge=0,
    )
    max_num_partial_prefills: int = option(
        SCHEDULING, 1, "Prefills that one step may leave unfinished; they share its budget.", ge=1, le=65_536
    )
    max_long_partial_prefills: int = option(
        SCHEDULING,
        1,
        "How many of max_num_partial_prefills may be long. If it is lower, shorter prompts pass long ones.",
        ge=1,
        le=65_536,
    )
    inter_token_latency_target: float = option(
        SCHEDULING,
        0.0,
        "Milliseconds that a step should take at most while something decodes: prefills get as many tokens as there is "
        "time for, by what steps have taken so far; never fewer than 32. 0: no target, a step takes what it takes.",
        ge=0,
        le=60_000,
    )
    scheduling_policy: Literal["fcfs", "priority", "deadline"] = option(
        SCHEDULING,
        "fcfs",
        "Order of requests. fcfs: first come, first served. priority: the lowest priority number first. deadline: the "
        "earliest deadline first, those without one last. Ties: first come.",
    )
    priority_aging: float = option(
        SCHEDULING,
        0.0,
        "Under scheduling_policy priority: seconds of waiting that count as one priority number, so that no request "
        "waits forever behind more urgent ones. 0: waiting does not count.",
        ge=0,
        le=86_400,
    )
    preemption_mode: Literal["recompute", "swap"] = option(
        SCHEDULING,
        "recompute",
        "How a preempted sequence gets its KV back. recompute: from its tokens. swap: from host memory (swap_space).",
    )
    swap_space: float = option(
        SCHEDULING,
        4.0,
        "GiB of host memory that each worker reserves for swapped KV, if preemption_mode is swap.",
        ge=0,
        le=4096,
    )
    max_steps_in_flight: int = option(
        SCHEDULING,
        default_steps_in_flight,
        "Maximum number of planned steps without a result. Default: pipeline stages plus one, which hides the "
        "scheduler's time behind the workers'; 1 with speculative_config and one stage, as drafts need the last "
        "result. Engines in one process (octavo.LLM) have 1.",
        ge=1,
        le=MOST_STEPS_IN_FLIGHT,
    )
    max_queued_requests: int = option(
        SCHEDULING, 2048, "Requests that may wait in one replica; more are refused with RESOURCE_EXHAUSTED.", ge=1
    )
    max_queued_tokens: int = option(
        SCHEDULING,
        4_194_304,
        "Prompt tokens that may wait in one replica; more are refused with RESOURCE_EXHAUSTED.",
        ge=1,
    )

    def _check_logprobs(self) -> None:
        """Raises ValueError."""
        most = _RESULT_BYTES // (_LOGPROB_BYTES * self.max_num_batched_tokens) - 1
        if self.max_logprobs > max(most, MAX_LOGPROBS):
            raise ValueError(
                f"max_logprobs={self.max_logprobs} with max_num_batched_tokens={self.max_num_batched_tokens}: the "
                f"logprobs of one step may not fit into a message; give at most {max(most, MAX_LOGPROBS)}, or fewer "
                "tokens"
            )

    def _check_prefills(self) -> None:
        """Raises ValueError."""
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} is above "
                f"max_num_partial_prefills={self.max_num_partial_prefills}: give at most as many"
            )
        if not self.enable_chunked_prefill and self.max_num_partial_prefills > 1:
            raise ValueError(
                f"max_num_partial_prefills={self.max_num_partial_prefills} needs enable_chunked_prefill: "
                "without it, prefills are never partial"
            )
        if not self.enable_chunked_prefill and self.inter_token_latency_target:
            raise ValueError(
                f"inter_token_latency_target={self.inter_token_latency_target:g} needs enable_chunked_prefill: without "
                "it, prefills can't be cut; leave one of the two out"
            )
