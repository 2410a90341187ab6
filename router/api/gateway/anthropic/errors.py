"""The errors that end a request, in Anthropic's shape."""

from http import HTTPStatus
from typing import Any

from router.api.gateway.errors import body_of, http_status

# Every path below it is Anthropic's.
PATH = "/v1/messages"
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
# What gRPC's messages begin with, where the field has another name here.
_FIELDS = {"thinking_token_budget": "thinking.budget_tokens"}
# How the place of an image ends, which has another name here.
_IMAGE = ".image_url.url"


def is_anthropics(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def message_error(error: BaseException) -> dict[str, Any]:
    """Returns {"type": "error", "error": {type, message}}."""
    status = http_status(error)
    kind = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    message = body_of(error)["error"]["message"]
    for name, own in _FIELDS.items():
        if message.startswith(name):
            message = own + message.removeprefix(name)
    message = message.replace(_IMAGE, ".source")
    return {"type": "error", "error": {"type": _TYPES.get(status, kind), "message": message}}
