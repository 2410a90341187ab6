"""The errors that end a request, in OpenAI's shape."""

import math
import re
from http import HTTPStatus
from typing import Any

import grpc
from pydantic import ValidationError

from router.errors import (
    InvalidConstraint,
    InvalidTools,
    MissingFeature,
    RequestError,
    Unauthenticated,
    UnknownModel,
    status_of,
)

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.CANCELLED: HTTPStatus.CONFLICT,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}
_TOOLS = "tools"
MODEL_NOT_FOUND = "model_not_found"
# OpenAI's codes, by which its clients tell errors of one status apart.
_CODES = {UnknownModel: MODEL_NOT_FOUND, Unauthenticated: "invalid_api_key"}
# Most messages begin with the field, named as in gRPC's messages.
# The place of an item, and the options of items, which have other names here.
_ITEM = re.compile(r"\bchat\.messages\[(\d+)\]\.parts\[(\d+)\]\.item\.(?:image|video)")
_NAMES = {"item_options": "mm_processor_kwargs"}
_FIELD = re.compile(r"(?:sampling\.|chat\.)?([a-z_]+)(?:\[\d+\])?(?:\.\w+)?(?:=| is | has )")


class BadRequestError(Exception):
    """The request is refused before it becomes a gRPC message; `str(error)` is what the client sees."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def http_status(error: BaseException) -> HTTPStatus:
    if isinstance(error, BadRequestError):
        return error.status
    return _STATUSES.get(status_of(error)[0], HTTPStatus.INTERNAL_SERVER_ERROR)


def headers_of(error: BaseException) -> dict[str, str]:
    """Returns Retry-After where a retry may help, and WWW-Authenticate where an API key is needed."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    return {}


def body_of(error: BaseException) -> dict[str, Any]:
    """Returns {"error": {message, type, param, code}}."""
    status, param, code = http_status(error), None, _CODES.get(type(error))
    message = str(error) if isinstance(error, BadRequestError) else status_of(error)[1]
    if isinstance(error, BadRequestError):
        param, code = error.param, error.code
    elif isinstance(error, RequestError) and status is HTTPStatus.BAD_REQUEST:
        message, is_items = _ITEM.subn(r"messages.\1.content.\2", message)
        for name, own in _NAMES.items():
            message = message.replace(name, own)
        named = _FIELD.match(message)
        param = "messages" if is_items else None if named is None else named[1]
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"error": {"message": message.removeprefix("sampling."), "type": kind, "param": param, "code": code}}


# What of_output() converts.
OUTPUT_ERRORS = (InvalidConstraint, InvalidTools, MissingFeature)


def of_output(
    error: InvalidConstraint | InvalidTools | MissingFeature, constraint_field: str, schema_field: str
) -> BadRequestError | MissingFeature:
    """Names the field by which an HTTP client says what the output must be.

    constraint_field: empty if the client has given no constraint, so that its tools are one. schema_field: of the tool
    with the index that stands for {}.
    """
    own = InvalidConstraint.FIELD if isinstance(error, MissingFeature) else error.field
    if not str(error).startswith(own):
        assert isinstance(error, MissingFeature)
        return error
    if isinstance(error, InvalidTools):
        field = _TOOLS if error.index is None else schema_field.format(error.index)
    else:
        field = constraint_field or _TOOLS
    return BadRequestError(field + str(error).removeprefix(own), param=field.partition(".")[0])


def of_validation(error: ValidationError) -> BadRequestError:
    """Converts pydantic's error; names the first field that is wrong."""
    errors = error.errors(include_url=False, include_input=False)
    # A field of several types has an error for each: the one that got furthest was meant.
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    told = max(of_field, key=lambda each: (each["type"] == "too_long", len(each["loc"])))
    # The place contains pydantic's types, too: they mean nothing to a client.
    place = [str(part) for part in told["loc"] if not isinstance(part, str) or (part.isidentifier() and part != "str")]
    if told["type"] == "json_invalid":
        return BadRequestError(f"the body is not valid JSON: {told['msg']}")
    where = ".".join(place) or "the body"
    if told["type"] == "extra_forbidden":
        return BadRequestError(f"{where}: there is no such field here", param=where)
    return BadRequestError(f"{where}: {told['msg']}", param=place[0] if place else None)
