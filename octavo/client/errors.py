"""The exceptions of the clients, and the one place where gRPC status codes become them.

    OctavoError
    ├── InvalidRequest      the request cannot be served as it is: a bad parameter, a prompt that is too long
    ├── AccessDenied        the router needs another API key than the one given, if any was
    ├── ModelNotFound       the named model is not served here
    ├── RequestNotFound     no replica knows the request (any more)
    ├── DuplicateRequest    a live request has this request_id
    ├── Superseded          another call went on with this request
    ├── Overloaded          queues are full, or the reader is too slow
    ├── Unavailable         nothing answers, no replica is ready, or the connection broke
    ├── DeadlineExceeded    the timeout passed
    ├── Cancelled           the request was cancelled
    ├── ServerError         the server failed at it
    └── ProtocolError       the server broke the contract of the wire: a gap, a message out of order

Messages are the server's own words wherever a server said them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc


class OctavoError(Exception):
    """Base of all errors of a client. `code` is the gRPC status behind it, if there is one. `retry_after_s`: seconds
    that the server asks to wait before another try; None: it says nothing of that."""

    def __init__(self, message: str, *, code: "grpc.StatusCode | None" = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(OctavoError, ValueError):
    """The request cannot be served as it is; the message names the field, the value and what would work."""


class AccessDenied(OctavoError):
    """The router needs an API key, does not know this one, or does not allow it this."""


class ModelNotFound(OctavoError):
    """The named model is not served here."""


class RequestNotFound(OctavoError):
    """No replica knows the request, or none does any more."""


class DuplicateRequest(OctavoError):
    """A live request has this request_id."""


class Superseded(OctavoError):
    """Another call, of a higher attempt, went on with this request."""


class Overloaded(OctavoError):
    """Queues are full, or the client read too slowly. Worth trying again later."""


class Unavailable(OctavoError):
    """Nothing answers, no replica is ready, or the connection broke."""


class DeadlineExceeded(OctavoError, TimeoutError):
    """The timeout passed before the request finished."""


class Cancelled(OctavoError):
    """The request was cancelled, by this client or another caller of Cancel."""


class ServerError(OctavoError):
    """The server failed at the request."""


class ProtocolError(OctavoError):
    """The server broke the contract of the wire."""


# By the names of gRPC's codes: whoever catches these exceptions need not have gRPC imported.
_BY_CODE: dict[str, type[OctavoError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
    "ALREADY_EXISTS": DuplicateRequest,
    "ABORTED": Superseded,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
}


def from_rpc_error(error: "grpc.RpcError", *, not_found: type[OctavoError] = ModelNotFound) -> OctavoError:
    """The exception that stands for a failed call. not_found: what this call can fail to find."""
    import grpc  # is there, for whoever has such an error

    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code: grpc.StatusCode = error.code()
    kind = not_found if code.name == "NOT_FOUND" else _BY_CODE.get(code.name, ServerError)
    if code.name == error.details() == "CANCELLED":
        # Not by Cancel, of which a router says so: gRPC's own word for calls that a server drops when it shuts down.
        kind = Unavailable
    return kind(error.details() or code.name, code=code, retry_after_s=_retry_after(error.trailing_metadata()))


def _retry_after(metadata: "Iterable[tuple[str, str | bytes]] | None") -> float | None:
    """Of the RetryInfo among a status's details (google.rpc, AIP-193); None if there is none that can be read."""
    packed = next((value for key, value in metadata or () if key == "grpc-status-details-bin"), None)
    if not isinstance(packed, bytes):
        return None
    from google.protobuf.message import DecodeError  # likewise
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    info = RetryInfo()
    try:
        found = any(detail.Unpack(info) for detail in Status.FromString(packed).details)
    except DecodeError:
        return None
    return max(info.retry_delay.seconds + info.retry_delay.nanos / 1e9, 0.0) if found else None
