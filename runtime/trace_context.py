"""W3C's `traceparent`: which trace a request belongs to, and which span of it made the call.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

import re

TRACEPARENT = "traceparent"
# version, trace id, span id, flags. Later versions may go on after the flags; nobody has defined one.
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_SAMPLED = 0x01


def valid_traceparent(text: str) -> str:
    """`text` if it is a traceparent, else "": who gets a bad one goes on as without one."""
    return text if _FORM.fullmatch(text) else ""


def trace_id_of(traceparent: str) -> str:
    """32 hexadecimal digits; "" if it is no traceparent."""
    found = _FORM.fullmatch(traceparent)
    return found.group(1) if found else ""


def is_sampled(traceparent: str) -> bool:
    """Whether whoever made it records its own spans; False if it is no traceparent."""
    found = _FORM.fullmatch(traceparent)
    return found is not None and bool(int(found.group(2), 16) & _SAMPLED)
