"""/openapi.json, and /docs, which shows it in Swagger UI. The page loads nothing from other hosts.

Both are open to all even where API keys are configured, as gRPC's reflection is: a browser sends no key when it opens a
page, and the document tells only what is in every copy of Octavo.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from router.api.gateway.errors import BadRequestError

_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript", "favicon-32x32.png": "image/png"}
_START = "start.js"
_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Octavo</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/{_START}"></script>
</html>
"""
_SCRIPT = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#ui", deepLinking: true, validatorUrl: null});\n'
# Swagger UI sets styles and draws its icons itself.
_ONLY_OWN = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'"
}


class Pages:
    def __init__(self, routes: Callable[[], Sequence[BaseRoute]], not_served: Callable[..., object]) -> None:
        """routes: those of the application, once it has all. not_served: the endpoint of those that are not there
        yet."""
        self._all, self._not_served = routes, not_served
        self._document = b""
        self.routes = [
            Route("/openapi.json", self._show_document, methods=["GET"]),
            Route("/docs", self._show_page, methods=["GET"]),
            Route("/docs/{file}", self._show_file, methods=["GET"]),
        ]

    async def _show_document(self, request: Request) -> Response:
        if not self._document:
            routed = [
                (each.path, each.methods or (), each.endpoint is not self._not_served)
                for each in self._all()
                if isinstance(each, Route) and each.path != "/docs/{file}"
            ]
            self._document = await asyncio.to_thread(_made, routed)
        return Response(self._document, media_type="application/json")

    async def _show_page(self, request: Request) -> Response:
        _directory()
        return HTMLResponse(_PAGE, headers=_ONLY_OWN)

    async def _show_file(self, request: Request) -> Response:
        file, directory = request.path_params["file"], _directory()
        if file == _START:
            return Response(_SCRIPT, media_type="text/javascript")
        if file not in _FILES:
            raise BadRequestError(f"GET {request.url.path}: Not Found", status=HTTPStatus.NOT_FOUND)
        return FileResponse(directory / file, media_type=_FILES[file])


def _made(routed: Sequence[tuple[str, Iterable[str], bool]]) -> bytes:
    # Imported once somebody asks: to make its models takes 40 ms.
    from router.api.gateway.openapi.document import document

    return document(routed)


def _directory() -> Path:
    """Returns where Swagger UI's files are. Raises BadRequestError."""
    try:
        from swagger_ui_bundle import swagger_ui_path
    except ModuleNotFoundError:
        raise BadRequestError(
            "/docs needs the Python package swagger-ui-bundle: install octavo[docs] where the router runs, or read "
            "/openapi.json",
            status=HTTPStatus.NOT_FOUND,
        ) from None
    return Path(swagger_ui_path)
