"""What a gRPC status says besides its message, as google.rpc has it (AIP-193): when to try again."""

import math

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from router.errors import RequestError

_KEY = "grpc-status-details-bin"


def trailing_metadata(error: BaseException, code: grpc.StatusCode, message: str) -> tuple[tuple[str, bytes], ...]:
    """For the abort of a call with this code and message; empty if there is nothing more to say."""
    if not isinstance(error, RequestError) or error.retry_after_s is None:
        return ()
    delay = Duration()
    delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=delay))
    status = Status(code=code.value[0], message=message, details=[detail])  # type: ignore[index]
    return ((_KEY, status.SerializeToString()),)
