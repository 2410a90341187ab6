"""The exceptions of the clients, and the one place where gRPC status codes become them.

    OctavoError
    ├── InvalidRequest      the request is invalid: a bad parameter, a prompt that is too long
    │   └── ItemsNeeded     a resume has to bring its images and videos again, as clients do by themselves
    ├── AccessDenied        the API key is missing, unknown, or not allowed to do this
    ├── ModelNotFound       the named model is not served here
    ├── RequestNotFound     no replica knows the request, or no router holds its stream, or no longer does
    ├── DuplicateRequest    a live request has this request_id
    ├── Superseded          another call took over this request
    ├── Overloaded          queues are full, or the reader is too slow
    ├── Unavailable         nothing answers, no replica is ready, or the connection broke
    ├── DeadlineExceeded    the timeout passed
    ├── Cancelled           the request was cancelled
    ├── ServerError         the server failed at the request
    └── ProtocolError       the server broke the contract of the wire: a gap, a message out of order

If the server sent a message, it is the exception's message.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc


class OctavoError(Exception):
    """Base of all errors of a client. `code` is the gRPC status behind it, if there is one. `retry_after_s`: seconds
    that the server asks to wait before a retry; None: it did not ask."""

    def __init__(self, message: str, *, code: "grpc.StatusCode | None" = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(OctavoError, ValueError):
    """The request is invalid; the message names the field, the value and what would work."""


class ItemsNeeded(InvalidRequest):
    """A resume has to bring its images and videos again: its router has not got them. The clients do so."""


class AccessDenied(OctavoError):
    """The router needs an API key, does not know this one, or does not allow it this call."""


class ModelNotFound(OctavoError):
    """The named model is not served here."""


class RequestNotFound(OctavoError):
    """No replica knows the request, or no router holds its stream, or no longer does."""


class DuplicateRequest(OctavoError):
    """A live request has this request_id."""


class Superseded(OctavoError):
    """Another call, with a higher attempt, took over this request."""


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


# ErrorInfo.reason.
_ITEMS_NEEDED = "ITEMS_NEEDED"
# By the names of gRPC's codes, so that this module does not import gRPC.
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
    """The exception for a failed call. not_found: the class for NOT_FOUND, by what this call looks up."""
    import grpc  # imported already: the error comes from it

    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code: grpc.StatusCode = error.code()
    retry_after_s, reason = _details(error.trailing_metadata())
    if code.name == error.details() == "CANCELLED":
        # Not caused by Cancel, for which a router gives details: gRPC reports calls like this that a server drops at
        # shutdown.
        return Unavailable(code.name, code=code, retry_after_s=retry_after_s)
    return from_status(
        code.name,
        error.details() or code.name,
        reason=reason,
        code=code,
        retry_after_s=retry_after_s,
        not_found=not_found,
    )


def from_status(
    name: str,
    message: str,
    *,
    reason: str = "",
    code: "grpc.StatusCode | None" = None,
    retry_after_s: float | None = None,
    not_found: type[OctavoError] = ModelNotFound,
) -> OctavoError:
    """The exception for a status. name: of its gRPC code. reason: ErrorInfo's. The rest: as in `from_rpc_error`."""
    kind = not_found if name == "NOT_FOUND" else _BY_CODE.get(name, ServerError)
    if kind is InvalidRequest and reason == _ITEMS_NEEDED:
        kind = ItemsNeeded
    return kind(message, code=code, retry_after_s=retry_after_s)


def _details(metadata: "Iterable[tuple[str, str | bytes]] | None") -> tuple[float | None, str]:
    """Returns seconds and reason from a status's details (google.rpc's RetryInfo and ErrorInfo, AIP-193); None, and
    empty, if there are no readable ones."""
    packed = next((value for key, value in metadata or () if key == "grpc-status-details-bin"), None)
    if not isinstance(packed, bytes):
        return None, ""
    # Imported only for such errors.
    from google.protobuf.message import DecodeError

    from protos.status_pb2 import ErrorDetail, RetryDetail, StatusDetails

    seconds: float | None = None
    reason = ""
    try:
        for detail in StatusDetails.FromString(packed).details:
            match detail.type_url.rpartition("/")[2]:
                case "google.rpc.RetryInfo":
                    delay = RetryDetail.FromString(detail.value).retry_delay
                    seconds = max(delay.seconds + delay.nanos / 1e9, 0.0)
                case "google.rpc.ErrorInfo":
                    reason = ErrorDetail.FromString(detail.value).reason
    except DecodeError:
        return None, ""
    return seconds, reason
