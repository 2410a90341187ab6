"""Keeps web pages from using a router that needs no key.

A router without keys takes whatever reaches it as its operator's. Programs reach it only from where it is bound, but a
browser on such a machine sends requests for every page that it shows. It says so: in Host (a name that leads here by
DNS rebinding), in Origin and in Sec-Fetch-Site. With keys there is nothing to keep away: a page has none.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.security.authentication import is_open
from runtime.security.hosts import Hosts

_ANY_ORIGIN = "*"
# POST paths whose body is a form, or is not read.
_NO_JSON = ("/v1/files", "/ping")
_NO_JSON_UNDER, _NO_JSON_END = "/v1/audio/", "/cancel"
_SHOWN_CHARS = 80
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """status, code and message of the error that a request gets."""

    status: HTTPStatus
    code: str
    message: str


class WebPageRules:
    """allowed_hosts, allowed_origins: the options. Nothing is refused before `bind`."""

    def __init__(self, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = ()) -> None:
        self._allowed_hosts, self._allowed_origins = allowed_hosts, frozenset(allowed_origins)
        self._hosts: Hosts | None = None

    def bind(self, host: str) -> None:
        """host: the address that the server is bound to."""
        self._hosts = Hosts(host, self._allowed_hosts)

    def why_refused(self, method: str, path: str, headers: Headers) -> Refusal | None:
        """Tells why a request may be that of a foreign page; None: it is let in."""
        if self._hosts is None:
            return None
        relevant, hosts = _Headers(), []
        for name, value in headers:
            if name == b"host":
                hosts.append(value.decode("latin-1"))
            elif name in _READ:
                setattr(relevant, _READ[name], value.decode("latin-1"))
        return (
            self._why_wrong_host(hosts, relevant)
            or self._why_foreign(method, path, hosts, relevant)
            or _why_no_json(method, path, relevant)
        )

    def _why_wrong_host(self, hosts: list[str], relevant: "_Headers") -> Refusal | None:
        assert self._hosts is not None
        hosts = [host for host in hosts if host]
        # HTTP/1.0 needs no Host; browsers always send one.
        if all(map(self._hosts.allows, hosts)) and (hosts or not relevant.is_browser):
            return None
        seen = ", ".join(host[:_SHOWN_CHARS] for host in hosts)
        return Refusal(
            HTTPStatus.FORBIDDEN,
            "host_not_allowed",
            f"Host={seen!r} is not a name of this router: without API keys it answers {self._hosts}. Add the name to "
            "the option allowed_hosts, or set api_keys_file",
        )

    def _why_foreign(self, method: str, path: str, hosts: list[str], relevant: "_Headers") -> Refusal | None:
        if relevant.origin is not None:
            if _ANY_ORIGIN in self._allowed_origins or relevant.origin in self._allowed_origins:
                return None
            # The page is this router's own: its name is that of Host, which is known to be ours.
            is_own = relevant.origin.partition("://")[2].lower() in [host.lower() for host in hosts]
            seen = f"Origin={relevant.origin[:_SHOWN_CHARS]!r}"
        else:
            is_own, seen = True, f"Sec-Fetch-Site={(relevant.site or '')[:_SHOWN_CHARS]!r}"
        if is_own and is_same_origin(relevant.site):
            return None
        # A link to a page that is the same in every copy of Octavo: who links to it can't read it.
        if (
            method in ("GET", "HEAD")
            and relevant.mode == "navigate"
            and relevant.destination == "document"
            and is_open(path)
        ):
            return None
        return Refusal(
            HTTPStatus.FORBIDDEN,
            "foreign_page",
            f"{seen}: a page of another origin asks. Without API keys this router answers programs and its own pages; "
            "add the page's origin to the option allowed_origins, or set api_keys_file",
        )


# Headers of browsers, and where they are kept.
_READ = {
    b"origin": "origin",
    b"sec-fetch-site": "site",
    b"sec-fetch-mode": "mode",
    b"sec-fetch-dest": "destination",
    b"content-type": "content_type",
    b"content-length": "length",
    b"transfer-encoding": "encoding",
}


@dataclass(slots=True)
class _Headers:
    """The headers by which a request is judged."""

    origin: str | None = None
    site: str | None = None
    mode: str | None = None
    destination: str | None = None
    content_type: str | None = None
    length: str | None = None
    encoding: str | None = None

    @property
    def is_browser(self) -> bool:
        return self.origin is not None or self.site is not None or self.mode is not None


def is_same_origin(site: str | None) -> bool:
    """site: the header Sec-Fetch-Site, which pages can't change. Programs and old browsers send none."""
    return site in (None, "same-origin", "none")


def _why_no_json(method: str, path: str, relevant: _Headers) -> Refusal | None:
    """Types that a form can have are sent for any page without asking this server first (CORS)."""
    if method != "POST" or path in _NO_JSON or path.startswith(_NO_JSON_UNDER) or path.endswith(_NO_JSON_END):
        return None
    if relevant.encoding is None and relevant.length in (None, "0"):
        return None
    if relevant.content_type is None and not relevant.is_browser:
        return None
    kind = (relevant.content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    return Refusal(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        f"Content-Type={(relevant.content_type or '')[:_SHOWN_CHARS]!r}: send application/json "
        "(curl: -H 'Content-Type: application/json')",
    )


class WebPageMiddleware:
    """Applies the rules to each request to an ASGI application."""

    def __init__(self, app: ASGIApp, rules: WebPageRules, refuse: Callable[[Refusal, str], Response]) -> None:
        """refuse: gets the path, too."""
        self._app, self._rules, self._refuse = app, rules, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._rules.why_refused(scope["method"], scope["path"], scope["headers"])
            if refusal is not None:
                await self._refuse(refusal, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
