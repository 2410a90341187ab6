"""What a gRPC status says besides its message: when to try again.

Twice: as google.rpc has it (AIP-193), for programs; and for retries by gRPC itself, of clients whose service config has
a retryPolicy (gRFC A6, "pushback"): those need no code for it, in any language.
"""

import math

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from router.errors import RequestError

_DETAILS_KEY, _PUSHBACK_KEY = "grpc-status-details-bin", "grpc-retry-pushback-ms"


def trailing_metadata(error: BaseException, code: grpc.StatusCode, message: str) -> tuple[tuple[str, str | bytes], ...]:
    """For the abort of a call with this code and message; empty if there is nothing more to say."""
    if not isinstance(error, RequestError) or error.retry_after_s is None:
        return ()
    milliseconds = math.ceil(error.retry_after_s * 1000)
    delay = Duration()
    delay.FromMilliseconds(milliseconds)
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=delay))
    status = Status(code=code.value[0], message=message, details=[detail])  # type: ignore[index]
    return ((_DETAILS_KEY, status.SerializeToString()), (_PUSHBACK_KEY, str(milliseconds)))
