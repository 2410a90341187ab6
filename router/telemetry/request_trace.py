"""The spans of one request, from its arrival at this router to its end.

octavo.request              parent: the caller's span, if its call brought a traceparent
├── octavo.tokenize         rendering the chat template and tokenizing, with the wait for a thread
├── octavo.placement        from there, or from the loss of a replica, until a replica has it
└── octavo.residence        while a replica has it; the parent of that scheduler's spans. Another one after each move,
                            linked to the one before
"""

import time
from typing import TYPE_CHECKING

from runtime.tracing import Attributes, Span, Tracing

if TYPE_CHECKING:
    from router.request import Request
    from router.telemetry.ended import EndedRequest

# Of the statuses that a request can end with, those which are a server's failures to OpenTelemetry; the others are the
# client's doing. (Semantic conventions for gRPC.)
_FAILURES = frozenset({"unknown", "deadline_exceeded", "internal", "unavailable"})
_PARAMETERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


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


class SpanTrace(RequestTrace):
    """Spans by a Tracing."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        """span: octavo.request."""
        self.trace_id = span.trace_id
        self._tracing, self._span = tracing, span
        self._residence: Span | None = None
        self._is_resident = False
        self._waiting_since = time.monotonic()

    def tokenized(self, since: float) -> None:
        self._waiting_since = time.monotonic()
        self._record("octavo.tokenize", since, {})

    def prepared(self, request: "Request") -> None:
        sampling = request.sampling
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": request.model,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "octavo.attempt": request.attempt,
        }
        given = {field.name: value for field, value in sampling.ListFields()}
        attributes |= {name: given[field] for field, name in _PARAMETERS.items() if field in given}
        self._span.set(attributes)

    def submitted(self, replica: str, num_resubmissions: int) -> str:
        attributes = {"octavo.replica": replica, "octavo.resubmissions": num_resubmissions}
        self._record("octavo.placement", self._waiting_since, attributes)
        before = self._residence
        self._residence = self._tracing.begin(
            "octavo.residence",
            parent=self._span.traceparent,
            at=time.monotonic(),
            attributes=attributes,
            link="" if before is None else before.traceparent,
        )
        self._is_resident = True
        return self._residence.traceparent

    def left(self, cause: str = "") -> None:
        if self._residence is not None and self._is_resident:
            self._is_resident, self._waiting_since = False, time.monotonic()
            self._residence.end(self._waiting_since, error=cause)

    def ended(self, outcome: str, error: str, ended: "EndedRequest | None") -> None:
        self.left()
        attributes: dict[str, str | int | float | tuple[str, ...]] = {"octavo.outcome": outcome}
        if error:
            attributes["error.type"] = outcome
        if ended is not None:
            attributes |= {
                "gen_ai.response.model": ended.request.model,
                "gen_ai.response.finish_reasons": ended.finish_reasons,
                "gen_ai.usage.output_tokens": sum(ended.num_output_tokens),
                "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
                "gen_ai.latency.e2e": ended.latency,
                "octavo.resubmissions": ended.num_resubmissions,
            }
            if ended.time_to_first_token is not None:
                attributes["gen_ai.latency.time_to_first_token"] = ended.time_to_first_token
        self._span.set(attributes)
        self._span.end(time.monotonic(), error=error if outcome in _FAILURES else "")

    def _record(self, name: str, begin: float, attributes: Attributes) -> None:
        self._tracing.record(
            name, parent=self._span.traceparent, begin=begin, end=time.monotonic(), attributes=attributes
        )
