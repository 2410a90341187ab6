"""Which trace a call belongs to, as it is told to the router."""

import sys
from collections.abc import Mapping

from octavo.errors import InvalidRequest
from runtime.trace_context import TRACEPARENT, valid_traceparent


def trace_metadata(given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """The call's metadata. given: W3C's headers, of which `traceparent` is passed on; None: the calling program's
    OpenTelemetry span at this moment, if it is in one.

    Raises InvalidRequest if `given` holds a bad traceparent.
    """
    if given is None:
        traceparent = _current()
    else:
        traceparent = next((value for name, value in given.items() if name.lower() == TRACEPARENT), "")
        if traceparent and not valid_traceparent(traceparent):
            raise InvalidRequest(f"trace_headers: traceparent={traceparent!r}: W3C's has the form 00-TRACE-SPAN-FLAGS")
    return ((TRACEPARENT, traceparent),) if traceparent else ()


def _current() -> str:
    # A program that is in a span has imported this; whoever has not pays nothing.
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers.get(TRACEPARENT, "")
