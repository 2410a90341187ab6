"""Everything that can end a request, and the status it ends with.

    RequestError
    ├── InvalidRequest       INVALID_ARGUMENT     a field can't be used as it is; the message says what would work
    │   ├── InvalidConstraint                     what the output must be can't be honoured
    │   └── InvalidTools                          no output can be made to follow the chat's tools
    ├── Unauthenticated      UNAUTHENTICATED      the call carries no API key that is known here
    ├── Forbidden            PERMISSION_DENIED    the API key does not allow it
    ├── UnknownModel         NOT_FOUND            the named model is not served here
    ├── UnknownRequest       NOT_FOUND            no replica knows the request (any more)
    ├── NotMigrated          FAILED_PRECONDITION  no other replica can continue the request (now)
    ├── NotKept              FAILED_PRECONDITION  a stream no longer has all that its reader lacks
    ├── MissingFeature       FAILED_PRECONDITION  no replica has a feature that the request needs
    ├── ItemsNeeded          FAILED_PRECONDITION  a resume has to bring its items again (reason ITEMS_NEEDED)
    ├── DuplicateRequest     ALREADY_EXISTS       a live request has this id (and attempt)
    ├── Superseded           ABORTED              a higher attempt of the request is live
    ├── Cancelled            CANCELLED            Cancel was called
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    the client's deadline passed
    ├── Exhausted            RESOURCE_EXHAUSTED
    │   ├── QueueFull                             every replica's queue is full
    │   ├── RouterFull                            the router has reached its limit of requests or of text
    │   ├── KeyFull                               the API key has as many live requests as it may have
    │   ├── RateLimited                           the API key's requests or tokens per minute are used up
    │   └── SlowReader                            the client reads more slowly than tokens arrive
    ├── Unavailable          UNAVAILABLE
    │   ├── NoReplica                             none is ready, or none came back in time
    │   └── Draining                              this router is shutting down
    └── Internal             INTERNAL             a bug of ours, or a computation that failed

A client may resume (protos/inference.proto, Resume) after every one but InvalidRequest, Unauthenticated,
Forbidden, UnknownModel, MissingFeature and Cancelled.
"""

import grpc
import grpc.aio


class RequestError(Exception):
    """Base of all these errors. `str(error)` is the status message that the client sees."""

    status = grpc.StatusCode.UNKNOWN
    # Seconds after which a retry may work; None: unknown.
    retry_after_s: float | None = None
    # For programs, in google.rpc's ErrorInfo, where the status does not say enough; empty: it does.
    reason = ""


class InvalidRequest(RequestError):
    status = grpc.StatusCode.INVALID_ARGUMENT


class InvalidConstraint(InvalidRequest):
    FIELD = "sampling.constraint"

    def __init__(self, problem: str, kind: str = "") -> None:
        """kind: the field of the constraint that is wrong; empty: the constraint itself."""
        # The message begins with it.
        self.field = f"{self.FIELD}.{kind}" if kind else self.FIELD
        self.problem = problem
        super().__init__(f"{self.field}: {problem}")


class InvalidTools(InvalidRequest):
    FIELD = "chat.tools"

    def __init__(self, problem: str, index: int | None = None) -> None:
        """index: of the tool whose schema is wrong; None: the tools together."""
        self.index = index
        # The message begins with it.
        self.field = self.FIELD if index is None else f"{self.FIELD}[{index}].parameters_json"
        super().__init__(f"{self.field}: {problem}")


class Unauthenticated(RequestError):
    status = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(RequestError):
    status = grpc.StatusCode.PERMISSION_DENIED


class UnknownModel(RequestError):
    status = grpc.StatusCode.NOT_FOUND


class UnknownRequest(RequestError):
    status = grpc.StatusCode.NOT_FOUND


class NotMigrated(RequestError):
    status = grpc.StatusCode.FAILED_PRECONDITION


class NotKept(RequestError):
    status = grpc.StatusCode.FAILED_PRECONDITION


class MissingFeature(RequestError):
    status = grpc.StatusCode.FAILED_PRECONDITION


class ItemsNeeded(RequestError):
    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ITEMS_NEEDED"


class DuplicateRequest(RequestError):
    status = grpc.StatusCode.ALREADY_EXISTS


class Superseded(RequestError):
    status = grpc.StatusCode.ABORTED


class Cancelled(RequestError):
    status = grpc.StatusCode.CANCELLED


class DeadlineExceeded(RequestError):
    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Exhausted(RequestError):
    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_after_s = 1.0


class QueueFull(Exhausted):
    pass


class RouterFull(Exhausted):
    pass


class KeyFull(Exhausted):
    pass


class RateLimited(Exhausted):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReader(Exhausted):
    pass


class Unavailable(RequestError):
    status = grpc.StatusCode.UNAVAILABLE
    retry_after_s = 1.0


class NoReplica(Unavailable):
    pass


class Draining(Unavailable):
    pass


class Internal(RequestError):
    status = grpc.StatusCode.INTERNAL


# A status message travels in an HTTP/2 header: clients refuse more than 8 KiB of headers.
_MESSAGE_CHARS = 2000


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Returns the status and message that an exception ends a request with; if unforeseen, INTERNAL without details."""
    if isinstance(error, RequestError):
        return error.status, str(error)[:_MESSAGE_CHARS]
    return grpc.StatusCode.INTERNAL, "the router failed; its log has the cause under this request's id"


class AddressError(OSError):
    """The server can't listen; the message names the options and what would work."""


class MissingPackageError(ImportError):
    """A service of option `compat` needs a package that is not installed; the message says which."""
