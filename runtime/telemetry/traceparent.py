"""W3C's `traceparent`, which links the spans of one request across processes."""

import re

TRACEPARENT = "traceparent"
# version, trace id, span id, flags. Later versions may add fields after the flags; none is defined yet.
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_SAMPLED = 0x01


def valid_traceparent(text: str) -> str:
    """Returns `text` if it is a traceparent, else "": a bad one is treated as none."""
    return text if _FORM.fullmatch(text) else ""


def trace_id_of(traceparent: str) -> str:
    """The trace id, 32 hexadecimal digits; "" if the text is not a traceparent."""
    found = _FORM.fullmatch(traceparent)
    return found.group(1) if found else ""


def is_sampled(traceparent: str) -> bool:
    """True if the sender of a traceparent records its own spans; False if the text is not a traceparent."""
    found = _FORM.fullmatch(traceparent)
    return found is not None and bool(int(found.group(2), 16) & _SAMPLED)
