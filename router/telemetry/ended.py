"""A request that was a stream and is over: what metrics, logs and traces tell of it."""

from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.request import Request


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


def reason_name(finish: pb.Finish | None) -> str:
    """In lower case, as metrics and spans have it; None: it has not finished."""
    reason = pb.FINISH_REASON_UNSPECIFIED if finish is None else finish.reason
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
