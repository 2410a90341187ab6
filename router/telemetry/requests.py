"""Reports each request as it arrives and ends: metrics, a log line, and its spans.

octavo.request              parent: the caller's span, if its call brought a traceparent
├── octavo.tokenize         rendering the chat template and tokenizing, with the wait for a thread
├── octavo.placement        from the end of tokenizing, or the loss of a replica, until a replica has the request
└── octavo.residence        while a replica has it; the parent of that scheduler's spans. Each move begins another one,
                            linked to the one before
"""

import logging
import time
from typing import Any

from protos import inference_pb2 as pb
from router.accepted import UNTRACED, EndedRequest, Request, RequestTrace
from router.security.identity import caller
from router.telemetry.call_context import incoming_traceparent, set_trace_id
from router.telemetry.metrics import RouterMetrics
from runtime.telemetry.tracing import Attributes, Span, Tracing

# Parameters that OpenTelemetry's semantic conventions name.
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")

# Statuses that OpenTelemetry counts as failures of the server (semantic conventions for gRPC); the others are the
# client's doing.
_FAILURES = frozenset({"unknown", "deadline_exceeded", "internal", "unavailable"})

log = logging.getLogger("octavo.router.requests")

# Characters kept of text that is invalid or not validated yet: an id may be as long as a message.
_MAX_ID, _MAX_ERROR = 128, 500
# Messages of this outcome quote what the client wrote; the log leaves them out.
_QUOTES_CLIENTS = "invalid_argument"


class RequestTelemetry:
    """Reports the requests of one router. Costs some microseconds per request, at its end, and nothing per token."""

    def __init__(self, metrics: RouterMetrics, tracing: Tracing | None, *, log_requests: bool) -> None:
        """log_requests: option enable_log_requests."""
        self._metrics, self._tracing, self._log_requests = metrics, tracing, log_requests

    def begin(self, message: pb.GenerateRequest) -> RequestTrace:
        """Begins the trace of a request that has arrived by the call that this task answers."""
        if self._tracing is None:
            return UNTRACED
        span = self._tracing.begin(
            "octavo.request",
            parent=incoming_traceparent(),
            at=time.monotonic(),
            attributes={
                "gen_ai.operation.name": "chat" if message.HasField("chat") else "text_completion",
                "gen_ai.request.id": message.request_id[:_MAX_ID],
            },
            kind="server",
        )
        if not span.is_sampled:
            return UNTRACED
        set_trace_id(span.trace_id)
        return SpanTrace(self._tracing, span)

    def end(
        self, request_id: str, trace: RequestTrace, ended: EndedRequest | None, *, outcome: str, error: str = ""
    ) -> None:
        """Reports the end. ended: None if refused before it became a stream. outcome, error: see RequestTrace.ended."""
        error = error[:_MAX_ERROR]
        self._metrics.requests.labels(outcome).inc()
        if ended is not None:
            self._metrics.observe_ended(ended)
        identity = caller()
        self._metrics.events.note(
            "ended",
            _summary(outcome, ended),
            replica="" if ended is None else ended.replica,
            request_id=request_id[:_MAX_ID],
            tenant=identity.tenant,
        )
        trace.ended(outcome, error, ended)
        if self._log_requests:
            fields: dict[str, Any] = {"request_id": request_id[:_MAX_ID], "outcome": outcome}
            if trace.trace_id:
                fields["trace_id"] = trace.trace_id
            if error and outcome != _QUOTES_CLIENTS:
                fields["error"] = error
            log.info("a request ended", extra=fields if ended is None else fields | _log_fields(ended))


def _summary(outcome: str, ended: EndedRequest | None) -> str:
    """Says how a request ended, without anything that a client wrote."""
    if ended is None:
        return outcome
    first = ended.time_to_first_token
    waited = "" if first is None else f", first after {first:.3f} s"
    return f"{outcome}: {sum(ended.num_output_tokens)} tokens in {ended.latency:.2f} s{waited}"


def _log_fields(ended: EndedRequest) -> dict[str, Any]:
    """Returns numbers and parameters, but nothing that a client wrote."""
    first = ended.time_to_first_token
    return {
        "prompt_tokens": len(ended.request.prompt_token_ids),
        "cached_tokens": ended.num_cached_tokens,
        "output_tokens": sum(ended.num_output_tokens),
        "draft_tokens": ended.num_draft_tokens,
        "accepted_draft_tokens": ended.num_accepted_tokens,
        "finish_reasons": ",".join(ended.finish_reasons),
        "parameters": _numbers_of(ended.request.sampling),
        "priority": ended.request.priority,
        "attempt": ended.request.attempt,
        "latency_s": round(ended.latency, 6),
        "time_to_first_token_s": None if first is None else round(first, 6),
        "resubmissions": ended.num_resubmissions,
        "replica": ended.replica,
    }


def _numbers_of(sampling: pb.SamplingParams) -> dict[str, int | float | bool]:
    """Returns the scalar fields. Stop strings and biases stay out: they may be confidential."""
    found = ((field.name, value) for field, value in sampling.ListFields())
    return {name: value for name, value in found if isinstance(value, int | float)}


class SpanTrace(RequestTrace):
    """Records the spans of one request."""

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
        attributes |= {f"gen_ai.request.{name}": given[name] for name in _PARAMETERS if name in given}
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
