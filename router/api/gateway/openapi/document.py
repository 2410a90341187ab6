"""The OpenAPI document of the HTTP API. It is the same for every cluster of a version: it names no model, and no host.

OpenAPI 3.0.3, not 3.1: the Swagger UI of swagger-ui-bundle does not show newer ones.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from router.api.gateway.anthropic.errors import is_anthropics
from router.api.gateway.openapi.answers import ANSWERS, TEXT, ref
from router.api.gateway.openapi.operations import OPERATIONS, Operation, operation_of
from router.api.gateway.openapi.schemas import REF, request_schemas
from runtime.wire import octavo_version

_ABOUT = """\
Octavo's HTTP API: OpenAI's and Anthropic's clients call it unmodified. A field's description says if it has no effect,
or is refused; null is the same as leaving a field out. A field that is not here is ignored, and the header
X-Octavo-Ignored-Fields of the answer names it."""
# What starlette writes behind a parameter's name.
_CONVERTER = re.compile(r":\w+}")
# A path, its methods, and whether it answers more than that it is not there yet.
Routed = tuple[str, Iterable[str], bool]


def document(routes: Iterable[Routed]) -> bytes:
    """Returns the document as JSON. Takes 0.1 s."""
    models = dict.fromkeys(model for operation in OPERATIONS.values() for model in operation.takes)
    paths: dict[str, dict[str, Any]] = {}
    for path, methods, is_served in routes:
        shown = _CONVERTER.sub("}", path)
        for method in sorted(map(str.lower, methods)):
            if method != "head":
                operation = operation_of(method, shown, is_served=is_served)
                paths.setdefault(shown, {})[method] = _operation(method, shown, operation)
    whole = {
        "openapi": "3.0.3",
        "info": {
            "title": "Octavo",
            "version": octavo_version(),
            "description": _ABOUT.replace("\n", " "),
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        # The host that served the document.
        "servers": [{"url": "."}],
        "paths": paths,
        "components": {
            "schemas": request_schemas([*models]) | ANSWERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A key where the router has api_keys_file.
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(whole)


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    error = ref("AnthropicError" if is_anthropics(path) else "Error")
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").rstrip("_"),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": _content(operation)},
            **{
                str(status): {
                    "description": HTTPStatus(status).phrase,
                    "content": {"text/plain": {"schema": TEXT}}
                    if operation.answers is None and status == HTTPStatus.SERVICE_UNAVAILABLE
                    else {"application/json": {"schema": error}},
                }
                for status in operation.statuses
            },
        },
    }
    if operation.statuses == (HTTPStatus.NOT_FOUND,) and operation.answers is None and not operation.is_open:
        del made["responses"]["200"]
    if names := re.findall(r"{(\w+)}", path):
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    if operation.takes:
        schemas = [{"$ref": REF.format(model=model.__name__)} for model in operation.takes]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.is_open:
        made["security"] = []
    return made


def _content(operation: Operation) -> dict[str, Any]:
    if operation.answers is None:
        return {operation.media_type: {"schema": TEXT}}
    content = {"application/json": {"schema": operation.answers}}
    if operation.streams is not None:
        # Each event's data, with `stream`.
        content["text/event-stream"] = {"schema": operation.streams}
    return content
