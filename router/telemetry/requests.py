"""Tells of requests when they come and when they end, to whom the options say."""

import logging
import time
from typing import Any

from protos import inference_pb2 as pb
from router.metrics import RouterMetrics
from router.telemetry.ended import EndedRequest
from router.telemetry.incoming import incoming_traceparent, set_trace_id
from router.telemetry.request_trace import UNTRACED, RequestTrace, SpanTrace
from runtime.tracing import Tracing

log = logging.getLogger("octavo.router.requests")

# Of what is not valid, or not validated yet: an id may be as long as a message.
_MAX_ID, _MAX_ERROR = 128, 500
# The messages of this outcome show what is wrong with a request, which is what the client wrote.
_QUOTES_CLIENTS = "invalid_argument"


class RequestTelemetry:
    """Of one router. Costs a request some microseconds, at its end; tokens cost nothing here."""

    def __init__(self, metrics: RouterMetrics, tracing: Tracing | None, *, log_requests: bool) -> None:
        """log_requests: option enable_log_requests."""
        self._metrics, self._tracing, self._log_requests = metrics, tracing, log_requests

    def begin(self, message: pb.GenerateRequest) -> RequestTrace:
        """A request has arrived, by the call that this task answers."""
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
        """It is over. ended: None if it was refused before it was a stream. outcome, error: see RequestTrace.ended."""
        error = error[:_MAX_ERROR]
        self._metrics.requests.labels(outcome).inc()
        if ended is not None:
            self._metrics.observe_ended(ended)
        trace.ended(outcome, error, ended)
        if self._log_requests:
            fields: dict[str, Any] = {"request_id": request_id[:_MAX_ID], "outcome": outcome}
            if trace.trace_id:
                fields["trace_id"] = trace.trace_id
            if error and outcome != _QUOTES_CLIENTS:
                fields["error"] = error
            log.info("a request ended", extra=fields if ended is None else fields | _log_fields(ended))


def _log_fields(ended: EndedRequest) -> dict[str, Any]:
    """Numbers and parameters; nothing that a client wrote."""
    first = ended.time_to_first_token
    return {
        "prompt_tokens": len(ended.request.prompt_token_ids),
        "cached_tokens": ended.num_cached_tokens,
        "output_tokens": sum(ended.num_output_tokens),
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
    """Its scalar fields. Stop strings and biases stay out: they may be part of what is secret."""
    found = ((field.name, value) for field, value in sampling.ListFields())
    return {name: value for name, value in found if isinstance(value, int | float)}
