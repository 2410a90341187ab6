"""A request as the router works on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.policies import Placement
from router.telemetry.request_trace import UNTRACED, RequestTrace


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
    def placement(self) -> Placement:
        """What a policy may want to know of it."""
        return Placement(
            token_ids=self.prompt_token_ids,
            cache_salt=self.cache_salt,
            session_key=self.session_key,
            priority=self.priority,
        )
