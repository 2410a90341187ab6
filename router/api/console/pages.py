"""/console: a page that shows a chat and the cluster. Its files lie in `static`; they load nothing from other hosts.

The page itself is open to all, as /docs is: a browser sends no key when it opens a page, and it is the same in every
copy of Octavo. What it shows needs a key where the router has keys; where it has none, it is for this machine alone.
"""

from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from router.api.console.feed import Feed, FeedStream
from router.api.console.state import explanation_json
from router.api.observer import Observer
from router.api.operator import Operator
from router.errors import Forbidden
from router.security.identity import caller
from router.security.web_pages import is_same_origin
from runtime.security.hosts import is_loopback

_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Another version's files must not be mixed with this one's.
    "Cache-Control": "no-cache",
}


class Console:
    def __init__(self, observer: Observer, operator: Operator, images: Callable[[], dict[str, Any]]) -> None:
        """images: tells what images a chat may have (router.api.console.images)."""
        self._operator = operator
        self._files = {file.name: file for file in _STATIC.iterdir() if file.suffix in _TYPES}
        self.feed = Feed(observer, images)
        self.routes: list[BaseRoute] = [
            Route("/console", self._show_page, methods=["GET"]),
            Mount(
                "/console",
                routes=[
                    Route("/static/{file}", self._show_file, methods=["GET"]),
                    Route("/data/feed", self._feed, methods=["GET"]),
                    Route("/data/requests/{request_id:path}", self._explain, methods=["GET"]),
                ],
            ),
        ]

    async def _show_page(self, request: Request) -> Response:
        return self._file("index.html")

    async def _show_file(self, request: Request) -> Response:
        file = request.path_params["file"]
        if file not in self._files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return self._file(file)

    def _file(self, name: str) -> Response:
        file = self._files[name]
        return FileResponse(file, media_type=_TYPES[file.suffix], headers=_HEADERS)

    async def _feed(self, request: Request) -> Response:
        _check_caller(request)
        return FeedStream(self.feed.events(caller()))

    async def _explain(self, request: Request) -> Response:
        _check_caller(request)
        answer = await self._operator.explain(request.path_params["request_id"])
        return Response(explanation_json(answer), media_type="application/json", headers=_HEADERS)


def _check_caller(request: Request) -> None:
    """Raises Forbidden for callers who may not see the cluster although they need no key.

    Without keys everybody counts as the operator, so only this machine is let in. The name in the header Host must be
    its own, too: a foreign page could reach the router by a name of its own that leads here.
    """
    if not is_same_origin(request.headers.get("sec-fetch-site")):
        raise Forbidden("the console answers pages of its own origin only")
    if caller().tenant:
        return
    peer = "" if request.client is None else request.client.host
    if not (is_loopback(peer) and is_loopback(request.url.hostname or "")):
        raise Forbidden(
            f"the console shows everybody's requests: without API keys it answers this machine only, at localhost, not "
            f"{peer} at {request.url.hostname}; set api_keys_file, or forward the port (ssh -L)"
        )
