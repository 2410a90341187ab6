"""A request from its arrival to its end: what the router works on, what traces it, and what is reported once it
has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """What a routing policy knows of a request."""

    # Of the prompt.
    token_ids: Sequence[int]
    cache_salt: str = ""
    session_key: str = ""
    # The lowest goes first.
    priority: int = 0


class RequestTrace:
    """This one tells nobody: the request is not traced."""

    # For logs; empty if it is not traced.
    trace_id = ""

    def tokenized(self, since: float) -> None:
        """Its prompt is tokens now. since: when that began."""

    def prepared(self, request: "Request") -> None:
        """It is valid and resolved."""

    def submitted(self, replica: str, num_resubmissions: int) -> str:
        """A replica gets it. Returns the traceparent for that one; empty: none."""
        return ""

    def left(self, cause: str = "") -> None:
        """The replica has it no longer, if one had. cause: if that was not its end."""

    def ended(self, outcome: str, error: str, ended: "EndedRequest | None") -> None:
        """outcome: as octavo_requests_total has it. error: the status message, if it failed. ended: None if it was
        refused before it was a stream."""


UNTRACED = RequestTrace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request, with everything resolved. arrival, deadline: on time.monotonic(); None: no deadline."""

    # As the client has it, and among those of all tenants (security.identity).
    request_id: str
    scoped_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: pb.SamplingParams
    arrival: float
    eos_token_ids: Sequence[int] = ()
    priority: int = 0
    cache_salt: str = ""
    session_key: str = ""
    deadline: float | None = None
    resume: pb.Resume | None = None
    trace: RequestTrace = UNTRACED

    @property
    def attempt(self) -> int:
        return 0 if self.resume is None else self.resume.attempt

    @property
    def log_fields(self) -> dict[str, str]:
        """For lines in the log that are about it."""
        fields = {"request_id": self.request_id}
        return fields | {"trace_id": self.trace.trace_id} if self.trace.trace_id else fields

    @property
    def routing_hints(self) -> RoutingHints:
        """Those of this request, for a policy."""
        return RoutingHints(
            token_ids=self.prompt_token_ids,
            cache_salt=self.cache_salt,
            session_key=self.session_key,
            priority=self.priority,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Times on time.monotonic(); None: it never got so far."""

    request: Request
    ended_at: float
    first_token_at: float | None
    last_token_at: float | None
    # Computed for this call, by choice: not those that a client brought to go on from.
    num_output_tokens: tuple[int, ...]
    num_cached_tokens: int
    # By choice, as protos/inference.proto names them, in lower case; "unspecified" for one that has not finished.
    finish_reasons: tuple[str, ...]
    num_resubmissions: int
    # The last one that had it; empty: none did.
    replica: str

    @property
    def latency(self) -> float:
        """Seconds from its arrival to its end."""
        return self.ended_at - self.request.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds, after the first one; choices are computed side by side, so the longest counts."""
        num_later = max(self.num_output_tokens, default=0) - 1
        if self.first_token_at is None or self.last_token_at is None or num_later < 1:
            return None
        return (self.last_token_at - self.first_token_at) / num_later


def finish_reason_name(finish: pb.Finish | None) -> str:
    """In lower case, as metrics and spans have it; None: it has not finished."""
    reason = pb.FINISH_REASON_UNSPECIFIED if finish is None else finish.reason
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
