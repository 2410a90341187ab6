"""Images by URL: what is fetched, from where, and all that is not. No network: answers are made here."""

import asyncio
from collections.abc import Mapping, Sequence

import httpx2
import pytest

from router.errors import InvalidRequest
from router.intake.media.fetching import Fetcher, is_public

PUBLIC = "93.184.215.14"
FILE = b"\x89PNG and so on"


class Internet:
    """Answers by URL; notes what was asked of which address. addresses: by host."""

    def __init__(
        self, answers: Mapping[str, httpx2.Response | Exception], addresses: Mapping[str, Sequence[str]]
    ) -> None:
        self.requests: list[httpx2.Request] = []
        self._answers, self._addresses = answers, addresses

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if host not in self._addresses:
            raise OSError("no such host")
        return self._addresses[host]

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        found = self._answers[f"{request.url.scheme}://{request.headers['host']}{request.url.raw_path.decode()}"]
        if isinstance(found, Exception):
            raise found
        return found


def _fetcher(internet: Internet, *domains: str, timeout: float = 5.0) -> Fetcher:
    return Fetcher(
        domains or ("images.test",), timeout, resolve=internet.resolve, transport=httpx2.MockTransport(internet.answer)
    )


async def _fetch(fetcher: Fetcher, url: str, most: int = 1000) -> bytes:
    reserved: list[int] = []
    data = await fetcher.fetch(url, "items[0].image.url", most, reserved.append)
    assert sum(reserved) == len(data)
    await fetcher.close()
    return data


def _file(data: bytes = FILE, **headers: str) -> httpx2.Response:
    return httpx2.Response(200, stream=httpx2.ByteStream(data), headers=headers)


def _to(location: str) -> httpx2.Response:
    return httpx2.Response(302, headers={"location": location})


async def test_a_file_comes_from_the_address_that_was_checked() -> None:
    internet = Internet({"https://images.test/a.png?b=1": _file()}, {"images.test": [PUBLIC]})
    assert await _fetch(_fetcher(internet, "Images.Test."), "https://IMAGES.test/a.png?b=1") == FILE
    (request,) = internet.requests
    assert (request.url.host, request.headers["host"]) == (PUBLIC, "images.test")
    # The certificate must be the host's.
    assert request.extensions["sni_hostname"] == "images.test"
    assert request.headers["accept-encoding"] == "identity"
    assert "cookie" not in request.headers


async def test_an_address_of_version_6() -> None:
    internet = Internet({"https://images.test/a": _file()}, {"images.test": ["2606:2800:21f::1"]})
    assert await _fetch(_fetcher(internet), "https://images.test/a") == FILE
    assert internet.requests[0].url.host == "2606:2800:21f::1"


async def test_redirects_within_the_list() -> None:
    answers: dict = {"https://images.test/a": _to("/b"), "https://images.test/b": _to("http://more.test/c")}
    internet = Internet({**answers, "http://more.test/c": _file()}, {"images.test": [PUBLIC], "more.test": ["1.1.1.1"]})
    assert await _fetch(_fetcher(internet, "images.test", "more.test"), "https://images.test/a") == FILE
    assert [request.url.host for request in internet.requests] == [PUBLIC, PUBLIC, "1.1.1.1"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "use a data: URI, https:// or http://"),
        ("ftp://images.test/a", "use a data: URI"),
        ("https://other.test/a", "its host is not one of allowed_media_domains"),
        ("https://images.test.evil.test/a", "its host is not one of"),
        ("https://evil.test#@images.test/a", "its host is not one of"),
        ("https://127.0.0.1/a", "its host is not one of"),
        ("https://user:pass@images.test/a", "has a user or password"),
        ("https://images.test:8080/a", "has port 8080"),
        ("http://local.test/a", "one of a private network"),
        ("http://mixed.test/a", "one of a private network"),
        ("http://nowhere.test/a", "can't be fetched .OSError."),
        ("https://images.test/to-loopback", "its host is not one of"),
        ("https://images.test/to-local", "one of a private network"),
        ("https://images.test/to-file", "use a data: URI"),
        ("https://images.test/round", "more than 3 redirects"),
        ("https://images.test/missing", "answered with status 404"),
        ("https://images.test/large", "has more than 1000 bytes: max_item_mib"),
        ("https://images.test/packed", "answered with compressed data, unasked"),
        ("https://images.test/broken", "can't be fetched .ConnectError."),
        ("https://images.test/" + "a" * 3000, "has 3020 characters: use at most 2048"),
        ("https://[::1", "can't be fetched .InvalidURL."),
    ],
)
async def test_what_is_not_fetched(url: str, words: str) -> None:
    answers: dict[str, httpx2.Response | Exception] = {
        "https://images.test/to-loopback": _to("http://127.0.0.1:80/a"),
        "https://images.test/to-local": _to("http://local.test/a"),
        "https://images.test/to-file": _to("file:///etc/passwd"),
        "https://images.test/round": _to("/round"),
        "https://images.test/missing": httpx2.Response(404),
        "https://images.test/large": _file(bytes(1001)),
        "https://images.test/packed": _file(b"x", **{"content-encoding": "br"}),
        "https://images.test/broken": httpx2.ConnectError("refused"),
    }
    addresses = {"images.test": [PUBLIC], "local.test": ["10.0.0.7"], "mixed.test": [PUBLIC, "127.0.0.1"]}
    internet = Internet(answers, addresses)
    fetcher = _fetcher(internet, "images.test", "local.test", "mixed.test", "nowhere.test")
    with pytest.raises(InvalidRequest, match=words):
        await _fetch(fetcher, url)
    # No request has gone to a host that is not public.
    assert {request.url.host for request in internet.requests} <= {PUBLIC}


async def test_nothing_is_fetched_without_the_option() -> None:
    internet = Internet({}, {"images.test": [PUBLIC]})
    fetcher = Fetcher((), 5.0, resolve=internet.resolve, transport=httpx2.MockTransport(internet.answer))
    with pytest.raises(InvalidRequest, match="allowed_media_domains is empty"):
        await _fetch(fetcher, "https://images.test/a")
    assert not internet.requests


async def test_a_server_that_hangs_is_given_up() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    fetcher = Fetcher(("images.test",), 0.05, resolve=never)
    with pytest.raises(InvalidRequest, match="was not fetched within media_fetch_timeout"):
        await _fetch(fetcher, "https://images.test/a")


async def test_memory_that_is_full_ends_a_fetch() -> None:
    internet = Internet({"https://images.test/a": _file()}, {"images.test": [PUBLIC]})

    def full(num_bytes: int) -> None:
        raise InvalidRequest("full")

    with pytest.raises(InvalidRequest, match=r"^full$"):
        await _fetcher(internet).fetch("https://images.test/a", "url", 1000, full)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "fe80::1%eth0",
        "not an address",
    ],
)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)
