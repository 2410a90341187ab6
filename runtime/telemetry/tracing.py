"""Sends spans to an OpenTelemetry collector (option otlp_traces_endpoint), linked by W3C's `traceparent`.

Times are those of time.monotonic(), as everywhere in Octavo. A thread of its own exports the spans, so a collector that
is slow or away costs spans, never a request. Nothing is imported from OpenTelemetry until a Tracing is opened.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from runtime.telemetry.traceparent import TRACEPARENT
from runtime.wire import octavo_version

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

# The types of span attributes; OpenTelemetry knows no others.
Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

# Time to export the last spans when the process ends.
_LAST_SPANS_S = 3.0
_INSTALL = "otlp_traces_endpoint needs OpenTelemetry's packages: install octavo[tracing], or leave the option empty"


class TracingError(Exception):
    """Traces can't be exported; the message names the option and what would work."""


class Span:
    """A span. It ends once; calls after its end change nothing."""

    def __init__(self, span: "trace.Span", wall_offset_ns: int) -> None:
        self._span, self._wall_offset_ns = span, wall_offset_ns
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.is_sampled = context.trace_flags.sampled
        # To be passed on in the calls that it makes.
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def add_event(self, name: str, at: float, attributes: Attributes) -> None:
        self._span.add_event(name, attributes, self._wall_time(at))

    def end(self, at: float, *, error: str = "") -> None:
        """Ends the span. error: why the work failed; empty if it did not."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._wall_time(at))

    def _wall_time(self, at: float) -> int:
        return round(at * 1e9) + self._wall_offset_ns


class Tracing:
    """Records and exports the spans of one process. Safe to use from several threads."""

    def __init__(self, provider: "TracerProvider", exporter: "SpanExporter") -> None:
        self._provider, self._exporter = provider, exporter
        self._tracer = provider.get_tracer("octavo", octavo_version())

    @classmethod
    def open(cls, endpoint: str, process: str) -> "Tracing":
        """endpoint: http:// or https:// with a path, or grpc:// or grpcs://. process: its name, such as "scheduler-0".

        OpenTelemetry's own variables set the rest: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and so on. Raises
        TracingError.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = _exporter(endpoint)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "opentelemetry":
                raise
            raise TracingError(_INSTALL) from None
        # OpenTelemetry logs a warning for each failed attempt and an error for each lost batch: the errors are enough.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        kind = process.partition("-")[0]
        resource = Resource.create(
            {
                "service.name": f"octavo-{kind}",
                "service.instance.id": process,
                "service.version": octavo_version(),
            }
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, exporter)

    def begin(
        self,
        name: str,
        *,
        parent: str,
        at: float,
        attributes: Attributes | None = None,
        kind: Literal["server", "internal"] = "internal",
        link: str = "",
    ) -> Span:
        """Begins a span. parent: a traceparent; if it is empty or bad, the span begins a trace. link: the traceparent
        of a span that it follows."""
        from opentelemetry import trace

        links = [trace.Link(trace.get_current_span(_context(link)).get_span_context())] if link else None
        # Taken at each begin, because the wall clock may be set while the process runs.
        wall_offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            _context(parent),
            trace.SpanKind.SERVER if kind == "server" else trace.SpanKind.INTERNAL,
            attributes,
            links,
            round(at * 1e9) + wall_offset_ns,
        )
        return Span(span, wall_offset_ns)

    def record(
        self, name: str, *, parent: str, begin: float, end: float, attributes: Attributes | None = None, error: str = ""
    ) -> Span:
        """Records a span that has already ended."""
        span = self.begin(name, parent=parent, at=begin, attributes=attributes)
        span.end(end, error=error)
        return span

    def close(self) -> None:
        """Exports the ended spans. Blocks for at most a few seconds."""
        # In a thread, because the SDK bounds retries only after the timeout of a call: 15 s, measured, if the collector
        # is away.
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(_LAST_SPANS_S)
        if closing.is_alive():
            self._exporter.shutdown()  # ends its retries


def _context(traceparent: str):
    """An OpenTelemetry context that holds the span of a traceparent and nothing else."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())


def _exporter(endpoint: str) -> "SpanExporter":
    """Raises TracingError, ModuleNotFoundError."""
    scheme, _, address = endpoint.partition("://")
    if scheme in ("http", "https") and address:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint)
    if scheme in ("grpc", "grpcs") and address:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(address, insecure=scheme == "grpc")
    raise TracingError(
        f"otlp_traces_endpoint={endpoint!r}: give http://HOST:4318/v1/traces or grpc://HOST:4317 (https://, grpcs:// "
        "with TLS)"
    )
