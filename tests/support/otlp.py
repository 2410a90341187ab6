"""A minimal OpenTelemetry collector for tests: OTLP over HTTP."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True, kw_only=True)
class SeenSpan:
    """An exported span. Ids are hexadecimal; parent and links are span ids; times are in ns."""

    process: str
    name: str
    trace: str
    id: str
    parent: str
    links: list[str]
    begin: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    error: str


class Collector:
    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._add(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def named(self, name: str) -> list[SeenSpan]:
        """Spans with this name, in the order in which they began."""
        with self._lock:
            return sorted((span for span in self._spans if span.name == name), key=lambda span: span.begin)

    def one(self, name: str) -> SeenSpan:
        (span,) = self.named(name)
        return span

    def _add(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for of_resource in request.resource_spans:
                resource = {each.key: _value(each.value) for each in of_resource.resource.attributes}
                for scope in of_resource.scope_spans:
                    self._spans += [_seen(resource["service.instance.id"], span) for span in scope.spans]


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    # The poll bounds how long the shutdown takes.
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


def _seen(process: str, span: Any) -> SeenSpan:
    return SeenSpan(
        process=process,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=[link.span_id.hex() for link in span.links],
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={each.key: _value(each.value) for each in span.attributes},
        events=[event.name for event in span.events],
        error=span.status.message,
    )


def _value(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_value(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")
