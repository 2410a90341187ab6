"""router.api.http: what a client may send, leave undone or leave unread on an HTTP connection. Real sockets."""

import asyncio
import contextlib
import socket
import ssl

import pytest

from router.api.http import connection, framing
from router.api.http.connection import MOST_HEADERS, MOST_OTHER_BYTES, MOST_PIPELINED
from router.api.http.framing import BYTES_A_PIECE, FREE_PIECES, AbsurdFraming, Framing
from router.streams import outbox
from runtime.security.tls import TlsFiles
from tests.support.certificates import Authority
from tests.support.http_connections import LARGE, WAIT_S, answered, sent, serving, to_end

_CHUNKED = b"POST /size HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def chunks(size: int, count: int) -> bytes:
    return (b"%x\r\n" % size + b" " * size + b"\r\n") * count


# --- Framing


async def test_bodies_in_many_tiny_chunks_end_their_connection() -> None:
    async with serving() as (gateway, port):
        # Twice as many as are free, on the wire; the second half is never parsed.
        answer = await sent(port, _CHUNKED, chunks(1, 2 * FREE_PIECES), b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"send at least 128 bytes in each" in answer
        assert b"connection: close" in answer
        assert (await sent(port, b"GET /ping HTTP/1.0\r\n\r\n")).endswith(b"pong")
        assert gateway.num_requests == 2


@pytest.mark.parametrize(("size", "count"), [(1, FREE_PIECES // 2), (BYTES_A_PIECE, 4 * FREE_PIECES), (5000, 100)])
async def test_bodies_in_chunks_are_read(size: int, count: int) -> None:
    async with serving() as (_, port):
        head = _CHUNKED.replace(b"host", b"connection: close\r\nhost")
        answer = await sent(port, head, chunks(size, count), b"0\r\n\r\n")
        assert answer.endswith(str(size * count).encode())


async def test_pieces_are_counted_over_all_requests_of_a_connection() -> None:
    async with serving() as (gateway, port):
        one = _CHUNKED + chunks(1, FREE_PIECES // 4) + b"0\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(one)
        assert b"200 OK" in await answered(reader)
        for _ in range(8):
            writer.write(one)
        await to_end(reader)
        writer.close()
        assert gateway.num_requests < 8


@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        ((b"GET / HTTP/1.1\r\n", b"a: b\r\n" * (MOST_HEADERS + 2)), 431, f"more than {MOST_HEADERS} header lines"),
        ((b"GET / HTTP/1.1\r\na: ", b"b" * (4 * MOST_OTHER_BYTES)), 431, "its body 0:"),
        ((b"GET /", b"b" * (4 * MOST_OTHER_BYTES)), 431, "its body 0:"),
        ((_CHUNKED, b"0\r\n", b"a: b\r\n" * (MOST_HEADERS + 1)), 431, "header lines"),
        ((_CHUNKED, b"1;" + b"x" * (4 * MOST_OTHER_BYTES)), 431, "its body 0:"),
        ((b"GET / HTTP/1.1\r\nfoo\x00bar: 1\r\n\r\n",), 400, "not an HTTP/1.1 request"),
        ((b"\x16\x03\x01 this is TLS",), 400, "not an HTTP/1.1 request"),
        ((_CHUNKED, b"xyz\r\n"), 400, "not an HTTP/1.1 request"),
        ((_CHUNKED.replace(b"host: a", b"content-length: 5"), b""), 400, "not an HTTP/1.1 request"),
    ],
)
async def test_what_is_not_taken_is_answered_and_ends_the_connection(
    parts: tuple[bytes, ...], status: int, says: str
) -> None:
    async with serving() as (_, port):
        answer = await sent(port, *parts)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert says.encode() in answer


async def test_requests_that_nobody_waits_for_are_bounded() -> None:
    async with serving() as (gateway, port):
        # They come in one read, and are parsed before the first is computed.
        await sent(port, b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n" * (MOST_PIPELINED + 2))
        assert gateway.num_requests <= 1
        assert b"pong" in await sent(port, b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n" * 2 + b"GET /ping HTTP/1.0\r\n\r\n")


async def test_an_upgrade_is_answered_in_http_1() -> None:
    """As `curl --http2` asks."""
    upgrade = b"host: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    async with serving() as (_, port):
        answer = await sent(
            port,
            b"POST /size HTTP/1.1\r\n" + upgrade + b"content-length: 3\r\n\r\nabc",
            b"POST /size HTTP/1.1\r\n" + upgrade + b"transfer-encoding: chunked\r\n\r\n" + chunks(2, 2),
            b"0\r\n\r\nPOST /size HTTP/1.1\r\n" + upgrade + b"content-length: 0\r\n\r\n",
            b"GET /ping HTTP/1.1\r\n" + upgrade + b"\r\nGET /ping HTTP/1.0\r\n\r\n",
        )
        said = [part.splitlines()[-1] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
        assert said == [b"3", b"4", b"0", b"pong", b"pong"]


@pytest.fixture(scope="module", name="tls")
def _tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, ssl.SSLContext]:
    authority = Authority(tmp_path_factory.mktemp("tls") / "ca")
    certificate, key = authority.sign("router")
    client = ssl.create_default_context(cafile=authority.ca)
    return TlsFiles(option="tls_cert_file", cert=certificate, key=key, ca=None), client


def _encrypted(context: ssl.SSLContext, port: int, plain: list[bytes]) -> tuple[bytes, bool]:
    """Sends each piece in a TLS record of its own. Returns the answer, and True if the server ended the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(65_536))
                continue
            break
        for piece in plain:
            tls.write(piece)
        got = b""
        try:
            raw.sendall(outgoing.read())
            while data := raw.recv(65_536):
                incoming.write(data)
                with contextlib.suppress(ssl.SSLWantReadError):
                    while part := tls.read(65_536):
                        got += part
                    # The server has said that it ends.
                    break
        except ConnectionError:
            return got, True
        return got, not got


async def test_many_tiny_tls_records_end_their_connection(tls: tuple[TlsFiles, ssl.SSLContext]) -> None:
    files, client = tls
    async with serving(tls=files) as (_, port):
        head = b"POST /size HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        few = [head % 200, *[b" "] * 200]
        assert (await asyncio.to_thread(_encrypted, client, port, few))[0].endswith(b"200")
        large = [head % 400_000, *[b" " * 4000] * 100]
        assert (await asyncio.to_thread(_encrypted, client, port, large))[0].endswith(b"400000")
        many = [head % 20_000, *[b" "] * 20_000]
        answer, is_ended = await asyncio.to_thread(_encrypted, client, port, many)
        assert (answer, is_ended) == (b"", True)


async def test_records_are_counted_however_reads_cut_them() -> None:
    turns = framing.ReadTurns(asyncio.get_running_loop())
    records = b"".join(b"\x17\x03\x03" + size.to_bytes(2) + bytes(size) for size in (0, 1, 7, 300, 0, 0, 16_640))
    for step in (1, 2, 3, 5, 8, 64, 30_000):
        ours, theirs = socket.socketpair()
        counted = framing.CountedSocket.of(ours, Framing(), turns)
        with counted, theirs:
            found = sum(
                counted._count_records(memoryview(records)[at : at + step]) for at in range(0, len(records), step)
            )
        assert found == 7


def test_tiny_segments_are_pieces_too() -> None:
    counts = Framing()
    for _ in range(FREE_PIECES + FREE_PIECES // BYTES_A_PIECE):
        counts.add(1, 1)
    with pytest.raises(AbsurdFraming, match="1033 bytes came in 1033 pieces"):
        counts.add(1, 1)


async def test_a_refused_connection_ends_also_if_its_request_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read has the headers, for which a task is made, and what is refused. Its client leaves, which does not show
    while nothing is read."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    lost, connection_lost = asyncio.Event(), connection.Connection.connection_lost

    def note(self: connection.Connection, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set()

    monkeypatch.setattr(connection.Connection, "connection_lost", note)
    async with serving() as (_, port), asyncio.timeout(WAIT_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_CHUNKED + chunks(1, 2 * FREE_PIECES))
        await writer.drain()
        writer.close()
        await lost.wait()


async def test_connections_that_a_turn_did_not_read_are_read_in_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read a turn: all requests are answered nevertheless."""
    monkeypatch.setattr(framing, "READS_S", 0.0)
    head = _CHUNKED.replace(b"host", b"connection: close\r\nhost")
    async with serving() as (_, port):
        answers = await asyncio.gather(*(sent(port, head, chunks(5000, 50), b"0\r\n\r\n") for _ in range(20)))
    assert all(answer.endswith(b"250000") for answer in answers)


async def test_small_requests_go_on_for_ever() -> None:
    """Each costs a connection nothing of what it may have."""
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(FREE_PIECES):
            writer.write(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await answered(reader)).endswith(b"pong")
        writer.close()


# --- Connections end


async def _early_answer(port: int, rest: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /ping HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n")
    head = await answered(reader)
    assert b"connection: close" in head
    assert head.endswith(b"pong")
    writer.write(rest)
    got = await to_end(reader)
    writer.close()
    return got


@pytest.mark.parametrize("rest", [b"", b"x", b"0123456789", b"0123456789GET /ping HTTP/1.1\r\n\r\n"])
async def test_an_answer_before_its_body_ends_the_connection(rest: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    async with serving() as (gateway, port):
        assert await _early_answer(port, rest) == b""
        assert gateway.num_requests == 1


async def test_an_answer_before_its_large_body_arrives_whole() -> None:
    """A connection that is closed at once is reset, and the client never sees why."""
    async with serving() as (_, port):
        got = await sent(port, b"POST /ping HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % LARGE, bytes(LARGE))
        assert got.endswith(b"pong")


@pytest.mark.parametrize("said", [b"", b"GET / HTT", b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\nGET / HTT", b"\r\n" * 50])
async def test_requests_that_do_not_come_end_the_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.1)
    async with serving() as (_, port):
        await sent(port, said)


async def test_bytes_behind_an_answer_do_not_put_off_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a request runs from the answer before it, whatever trickles in."""
    monkeypatch.setattr(connection, "HEADERS_S", 0.5)
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
        await answered(reader)
        ended = asyncio.create_task(to_end(reader))
        async with asyncio.timeout(WAIT_S):
            while not ended.done():
                writer.write(b"\r\n")
                await asyncio.sleep(0.02)
        writer.close()


async def test_a_client_that_reads_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "UNREAD_S", 0.1)
    monkeypatch.setattr(connection, "_LATER_S", 0.0)
    ended = asyncio.Event()
    lost = connection.Connection.connection_lost
    monkeypatch.setattr(connection.Connection, "connection_lost", lambda *it: (lost(*it), ended.set()))
    async with serving() as (_, port):
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", port))
            silent.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                await ended.wait()
