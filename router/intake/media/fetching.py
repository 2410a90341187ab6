"""Fetches images by URL: only from hosts that an option names, and never from a private network.

A name is resolved once. Its addresses are checked, and the connection goes to one of them, so that another answer to a
second question (DNS rebinding) leads nowhere. Redirects are followed to listed hosts only, each checked like the first.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx2

from router.errors import InvalidRequest

_MOST_URL = 2048
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Fetches at once; others wait, within their time.
_MOST_FETCHES = 16
_PORTS = {"http": 80, "https": 443}

# Returns the addresses of a host, as text. Raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Asks the system. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Tells whether an address belongs to the Internet, also behind the notations that wrap IPv4 addresses."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            return False
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1] or _nat64(found)
        if inner is not None:
            found = inner
    return found.is_global and not found.is_multicast and not found.is_reserved


def _nat64(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    network = ipaddress.IPv6Network("64:ff9b::/96")
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in network else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a URL leads: `url` has an address in place of the host's name."""

    url: httpx2.URL
    host: str
    # The Host header.
    authority: str


class Fetcher:
    def __init__(
        self,
        domains: Sequence[str],
        timeout: float,
        *,
        resolve: Resolve = resolve,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """domains: option allowed_media_domains. timeout: seconds for a file. transport: for tests; None: HTTP."""
        self._domains = frozenset(domain.strip().lower().rstrip(".") for domain in domains)
        self._timeout = timeout
        self._resolve = resolve
        self._transport = transport
        self._turns = asyncio.Semaphore(_MOST_FETCHES)
        # Made for the first fetch: certificates take 20 ms to load.
        self._client: httpx2.AsyncClient | None = None

    async def fetch(self, url: str, field: str, most_bytes: int, reserve: Callable[[int], None]) -> bytes:
        """Returns a file. field: the URL's, for errors. reserve: called before so many more bytes are held; may raise.

        Raises InvalidRequest.
        """
        if len(url) > _MOST_URL:
            raise InvalidRequest(f"{field} has {len(url)} characters: use at most {_MOST_URL}, or send the data")
        try:
            async with asyncio.timeout(self._timeout), self._turns:
                return await self._follow(url, field, most_bytes, reserve)
        except TimeoutError:
            raise InvalidRequest(
                f"{field}={url!r} was not fetched within media_fetch_timeout={self._timeout:g} s: send the data"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            raise InvalidRequest(f"{field}={url!r} can't be fetched ({type(error).__name__}): send the data") from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _follow(self, url: str, field: str, most_bytes: int, reserve: Callable[[int], None]) -> bytes:
        target = httpx2.URL(url)
        for _ in range(_MOST_REDIRECTS + 1):
            place = await self._checked(target, field)
            request = self._http.build_request(
                "GET",
                place.url,
                # No compression: a small answer could become a large one in one step.
                headers={"host": place.authority, "accept": "image/*", "accept-encoding": "identity"},
                extensions={"sni_hostname": place.host},
            )
            answer = await self._http.send(request, stream=True)
            try:
                if answer.status_code in _REDIRECTS:
                    target = target.join(answer.headers.get("location", ""))
                    continue
                return await _body(answer, str(target), field, most_bytes, reserve)
            finally:
                await answer.aclose()
        raise InvalidRequest(f"{field}={url!r} leads through more than {_MOST_REDIRECTS} redirects: send the data")

    @property
    def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            # Proxies and passwords of the environment are not for addresses that strangers name.
            self._client = httpx2.AsyncClient(
                transport=self._transport,
                trust_env=False,
                follow_redirects=False,
                timeout=self._timeout,
                limits=httpx2.Limits(max_connections=_MOST_FETCHES, max_keepalive_connections=0),
            )
        return self._client

    async def _checked(self, url: httpx2.URL, field: str) -> _Place:
        """Raises InvalidRequest, OSError."""
        shown, host = f"{field}={str(url)[:200]!r}", url.host.lower().rstrip(".")
        if url.scheme not in _PORTS:
            raise InvalidRequest(f"{shown}: use a data: URI, https:// or http://")
        if not self._domains:
            raise InvalidRequest(
                f"{shown}: this router fetches nothing (allowed_media_domains is empty): send the data"
            )
        if host not in self._domains:
            raise InvalidRequest(f"{shown}: its host is not one of allowed_media_domains: send the data")
        if url.userinfo:
            raise InvalidRequest(f"{shown} has a user or password: send the data")
        if url.port not in (None, _PORTS[url.scheme]):
            raise InvalidRequest(f"{shown} has port {url.port}: leave it out, or send the data")
        addresses = await self._resolve(host, _PORTS[url.scheme])
        # One private address among several is enough to be suspicious.
        if not addresses or not all(map(is_public, addresses)):
            raise InvalidRequest(f"{shown}: its host has no address, or one of a private network: send the data")
        return _Place(url=url.copy_with(host=addresses[0]), host=host, authority=host)


async def _body(
    answer: httpx2.Response, url: str, field: str, most_bytes: int, reserve: Callable[[int], None]
) -> bytes:
    """Raises InvalidRequest."""
    shown = f"{field}={url[:200]!r}"
    if answer.status_code != 200:
        raise InvalidRequest(f"{shown} answered with status {answer.status_code}: send the data")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest(f"{shown} answered with compressed data, unasked: send the data")
    body = bytearray()
    async for part in answer.aiter_raw():
        if len(body) + len(part) > most_bytes:
            raise InvalidRequest(f"{shown} has more than {most_bytes} bytes: max_item_mib allows no more")
        reserve(len(part))
        body += part
    return bytes(body)
