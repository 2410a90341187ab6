"""A request from arrival to end: the validated request, its trace, and the report of its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.features import CONSTRAINT
from protos import inference_pb2 as pb
from runtime.media.packed import PackedItem


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """The hints about a request that a routing policy gets."""

    # The prompt.
    token_ids: Sequence[int]
    cache_salt: str = ""
    session_key: str = ""
    # Lower runs first.
    priority: int = 0
    tenant: str = ""
    # Features that the replica must have (configs.features).
    features: frozenset[str] = frozenset()
    # Its max_logprobs must be as high.
    num_logprobs: int = 0
    # First token and name of each item in the prompt.
    items: Sequence[tuple[int, bytes]] = ()


def fingerprint_of(model: pb.ModelInfo, features: frozenset[str]) -> str:
    """Returns what must be equal at two replicas for a request with these features to continue exactly. Only outputs
    with a constraint depend on the grammar engine, so it counts for them alone."""
    return f"{model.fingerprint}+{model.grammar_engine}" if CONSTRAINT in features else model.fingerprint


class RequestTrace:
    """Follows a request from arrival to end. This base does nothing, for a request that is not traced."""

    # For logs; empty if the request is not traced.
    trace_id = ""

    def tokenized(self, since: float) -> None:
        """Notes that the prompt is tokenized. since: when tokenizing began."""

    def prepared(self, request: "Request") -> None:
        """Notes that the request is valid and resolved."""

    def submitted(self, replica: str, num_resubmissions: int) -> str:
        """Notes that a replica gets the request. Returns the traceparent for that replica; empty: none."""
        return ""

    def left(self, cause: str = "") -> None:
        """Notes that the replica, if one had the request, no longer has it. cause: why, unless this is the end."""

    def ended(self, outcome: str, error: str, ended: "EndedRequest | None") -> None:
        """Notes the end. outcome: the label of octavo_requests_total. error: the status message, if the request failed.
        ended: None if it was refused before it became a stream."""


UNTRACED = RequestTrace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request, with everything resolved. arrival, deadline: on time.monotonic(); None: no deadline."""

    # The client's own id, and the one that is unique over all tenants (security.identity).
    request_id: str
    scoped_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: pb.SamplingParams
    arrival: float
    eos_token_ids: Sequence[int] = ()
    priority: int = 0
    # The tenant that asks, and its weight (security.identity). Empty: there are no tenants.
    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    session_key: str = ""
    deadline: float | None = None
    # Those that it needs of a replica (configs.features).
    features: frozenset[str] = frozenset()
    # Logprobs that it wants beside a token, at most.
    num_logprobs: int = 0
    resume: pb.Resume | None = None
    # Resolved. None: tokens are drawn one after the other.
    beam_search: pb.BeamSearch | None = None
    # The chat's tools and their choice. None: the output is not parsed.
    parsed_chat: pb.ChatPrompt | None = None
    # Its deltas have the reasoning.
    include_reasoning: bool = True
    trace: RequestTrace = UNTRACED
    # The images and videos among the prompt's tokens, and their files.
    items: Sequence[pb.ItemSpan] = ()
    item_files: Sequence[PackedItem] = ()

    @property
    def attempt(self) -> int:
        return 0 if self.resume is None else self.resume.attempt

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields for log lines about this request."""
        fields = {"request_id": self.request_id}
        return fields | {"trace_id": self.trace.trace_id} if self.trace.trace_id else fields

    @property
    def routing_hints(self) -> RoutingHints:
        """The part of this request that a policy sees."""
        return RoutingHints(
            token_ids=self.prompt_token_ids,
            cache_salt=self.cache_salt,
            session_key=self.session_key,
            priority=self.priority,
            tenant=self.tenant,
            features=self.features,
            num_logprobs=self.num_logprobs,
            items=[(span.first_token, span.name) for span in self.items],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """The report of an ended request. Times are on time.monotonic(); None: it did not get that far."""

    request: Request
    ended_at: float
    first_token_at: float | None
    last_token_at: float | None
    # Tokens of each choice that were computed for this call; tokens that a resume brought do not count.
    num_output_tokens: tuple[int, ...]
    num_cached_tokens: int
    # For each choice, named as in protos/inference.proto, in lower case; "unspecified" if it has not finished.
    finish_reasons: tuple[str, ...]
    num_resubmissions: int
    # The last replica that had the request; empty: none did.
    replica: str
    # Speculation: draft tokens, and those of them that were accepted.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def latency(self) -> float:
        """Seconds from arrival to end."""
        return self.ended_at - self.request.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; choices are computed in parallel, so the longest one counts."""
        num_later = max(self.num_output_tokens, default=0) - 1
        if self.first_token_at is None or self.last_token_at is None or num_later < 1:
            return None
        return (self.last_token_at - self.first_token_at) / num_later


def finish_reason_name(finish: pb.Finish | None) -> str:
    """Returns the reason in lower case, for metrics and spans. finish: None if the choice has not finished."""
    reason = pb.FINISH_REASON_UNSPECIFIED if finish is None else finish.reason
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
