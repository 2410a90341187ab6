"""The same bytes in pieces of many sizes, and senders of them, for benchmarks.router.harm.framing and siege.

    python -m benchmarks.router.harm.framings --port 50051 --http-port 8000 --layers http --share 0.25

Sends over many connections at once to a router on this machine.
"""

import argparse
import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

BYTES, _BLOCK = 4 * 2**20, 65_536
# A sender gives up a connection that takes no more bytes for so long.
_STUCK_S = 3.0
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_LONG = b"content-length: %d\r\n\r\n" % (8 * 2**20)
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_GENERATE, _REFLECTION = "/octavo.v1.Inference/Generate", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@dataclass(frozen=True, slots=True)
class Framing:
    """first: sent once on a connection; again: as often as it takes. piece: TLS: bytes of one record. segment: bytes of
    one call of send(); 0: large ones. window: HTTP/2's flow control holds."""

    layer: str
    name: str
    first: bytes
    again: bytes
    piece: int = 0
    segment: int = 0
    window: bool = False


def _chunk(size: int, extension: bytes = b"") -> bytes:
    return b"%x" % size + extension + b"\r\n" + b" " * size + b"\r\n"


def _frame(kind: int, payload: bytes, stream: int = 1, flags: int = 0) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _call(path: str) -> bytes:
    def string(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    headers = (
        *(b"\x83\x86\x04", string(path.encode()), b"\x01", string(b"localhost"), b"\x0f\x10"),
        *(string(b"application/grpc"), b"\x00", string(b"te"), string(b"trailers")),
    )
    return _PREFACE + _frame(_SETTINGS, b"", 0) + _frame(_HEADERS, b"".join(headers), flags=4)


def _many(piece: bytes) -> bytes:
    return piece * max(1, _BLOCK // len(piece))


def framings() -> list[Framing]:
    message = _call(_GENERATE) + _frame(_DATA, struct.pack(">BI", 0, 8 * 2**20))
    http = [
        Framing("http", "one body", _HEAD + _LONG, bytes(_BLOCK)),
        *(Framing("http", f"chunks of {n}", _HEAD + _CHUNKED, _many(_chunk(n))) for n in (16_384, 256, 64, 8, 1)),
        Framing("http", "chunks of 1, extended", _HEAD + _CHUNKED, _many(_chunk(1, b";" + b"x" * 100))),
        Framing("http", "segments of 1", _HEAD + _LONG, b" " * 4096, segment=1),
        Framing("http", "header lines", _HEAD, _many(b"a:b\r\n")),
        Framing("http", "one header", _HEAD + b"a: ", b"b" * _BLOCK),
        Framing("http", "trailers", _HEAD + _CHUNKED + b"0\r\n", _many(b"a:b\r\n")),
        Framing("http", "pipelined", b"", _many(b"GET /ping HTTP/1.1\r\n\r\n")),
        Framing("http", "empty lines", b"", _many(b"\r\n")),
    ]
    tls = [
        Framing("tls", f"records of {n}", _HEAD + _LONG, b" " * (_BLOCK if n > 64 else 4096), piece=n)
        for n in (16_384, 1024, 64, 8, 1)
    ]
    http2 = [
        *(
            Framing("http2", f"DATA of {n}", message, _many(_frame(_DATA, bytes(n))), window=True)
            for n in (16_384, 1024, 64, 8, 1)
        ),
        Framing("http2", "empty DATA", message, _many(_frame(_DATA, b""))),
        Framing("http2", "PING", message, _many(_frame(_PING, bytes(8), 0))),
        Framing("http2", "SETTINGS", message, _many(_frame(_SETTINGS, b"", 0))),
        Framing("http2", "WINDOW_UPDATE", message, _many(_frame(_WINDOW, struct.pack(">I", 1), 1))),
    ]
    asked = _call(_REFLECTION)
    grpc = [
        Framing("grpc", "one message", message, _many(_frame(_DATA, bytes(16_384))), window=True),
        Framing("grpc", "empty messages", asked, _many(_frame(_DATA, bytes(5 * 1024))), window=True),
    ]
    return [*http, *tls, *http2, *grpc]


class Sender:
    """Sends one framing over one connection."""

    def __init__(self, framing: Framing, port: int, context: ssl.SSLContext | None) -> None:
        self._framing = framing
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_STUCK_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The connection's window and the stream's (RFC 9113, 6.9).
        self._windows = [65_535, 65_535]
        self._unread = b""
        self._tls: ssl.SSLObject | None = None
        if context is not None:
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
            self._shake_hands(self._tls)

    def send(self, num_bytes: int) -> tuple[int, bool]:
        """Returns the bytes sent, at least so many unless the router ends the connection, and True if it has."""
        num_sent = 0
        try:
            self._send(self._framing.first)
            num_sent = len(self._framing.first)
            while num_sent < num_bytes:
                num_sent += self._send(self._framing.again)
                if self._is_over():
                    return num_sent, True
        except OSError:
            return num_sent, True
        return num_sent, False

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes) -> int:
        if self._tls is not None:
            piece = self._framing.piece
            for start in range(0, len(data), piece):
                self._tls.write(data[start : start + piece])
            data = self._outgoing.read()
        if self._framing.window and data is self._framing.again:
            self._await_window(data)
        step = self._framing.segment if data is self._framing.again else 0
        for start in range(0, len(data), step or len(data) or 1):
            self._socket.sendall(data[start : start + (step or len(data))])
        return len(data)

    def _await_window(self, data: bytes) -> None:
        size = int.from_bytes(data[:3])
        payload = len(data) // (9 + size) * size
        until = time.monotonic() + _STUCK_S
        while min(self._windows) < payload:
            if time.monotonic() > until:
                raise TimeoutError("no window")
            self._read_frames(0.1)
        self._windows = [each - payload for each in self._windows]

    def _read_frames(self, seconds: float) -> None:
        self._socket.settimeout(seconds)
        try:
            received = self._socket.recv(_BLOCK)
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(_STUCK_S)
        if not received:
            raise ConnectionError("closed")
        data = self._unread + received
        while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3])):
            kind, stream = data[3], int.from_bytes(data[5:9])
            if kind == _WINDOW:
                self._windows[min(stream, 1)] += int.from_bytes(data[9:13])
            elif kind == _SETTINGS and not data[4]:
                self._socket.sendall(_frame(_SETTINGS, b"", 0, 1))
            data = data[9 + size :]
        self._unread = data

    def _is_over(self) -> bool:
        """True if the router has answered or closed: over HTTP/1.1, it takes no more then."""
        if self._framing.layer in ("http2", "grpc"):
            with contextlib.suppress(BlockingIOError):
                self._socket.setblocking(False)
                try:
                    if not self._socket.recv(1, socket.MSG_PEEK):
                        return True
                finally:
                    self._socket.settimeout(_STUCK_S)
                if not self._framing.window:
                    self._read_frames(0.1)
            return False
        with contextlib.suppress(BlockingIOError):
            self._socket.setblocking(False)
            try:
                while True:
                    if not self._socket.recv(_BLOCK):
                        return True
            finally:
                self._socket.settimeout(_STUCK_S)
        return False

    def _shake_hands(self, tls: ssl.SSLObject) -> None:
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._incoming.write(self._socket.recv(_BLOCK))
            else:
                self._socket.sendall(self._outgoing.read())
                return


class _Pace:
    """Holds the threads of this process back to a share of one core: none of it is saved up for later."""

    _WINDOW_S = 0.05

    def __init__(self, share: float) -> None:
        self._share, self._lock = share, threading.Lock()
        self._since, self._cpu_since = time.monotonic(), time.process_time()

    def wait(self) -> None:
        while self._is_ahead():
            time.sleep(self._WINDOW_S / 5)

    def _is_ahead(self) -> bool:
        with self._lock:
            now, cpu = time.monotonic(), time.process_time()
            if cpu - self._cpu_since > self._share * (now - self._since):
                return True
            if now - self._since > self._WINDOW_S:
                self._since, self._cpu_since = now, cpu
            return False


def flood(
    framing: Framing,
    port: int,
    context: ssl.SSLContext | None,
    connections: int,
    seconds: float,
    pace: _Pace | None = None,
) -> None:
    """Sends over so many connections; one that ends is opened again."""
    until = time.monotonic() + seconds
    size = BYTES // 16 if pace is None else _BLOCK

    def one() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                sender = Sender(framing, port, context)
                try:
                    while time.monotonic() < until and not sender.send(size)[1]:
                        if pace is not None:
                            pace.wait()
                finally:
                    sender.close()
            if pace is not None:
                pace.wait()

    threads = [threading.Thread(target=one) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def flood_with_all(
    port: int, http_port: int, layers: Sequence[str], connections: int, seconds: float, share: float
) -> None:
    """Sends each framing of these layers over some of so many connections. share: of one core, that all may take."""
    chosen, pace = [each for each in framings() if each.layer in layers], _Pace(share)
    threads = [
        threading.Thread(target=flood, args=(each, http_port if each.layer == "http" else port, None, 1, seconds, pace))
        for each in (chosen[number % len(chosen)] for number in range(connections))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=50051)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--layers", default="http", help="of http, http2 and grpc; default: %(default)s")
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.25, help="of one core, for all senders; default: %(default)s")
    arguments = parser.parse_args()
    flood_with_all(
        arguments.port,
        arguments.http_port,
        arguments.layers.split(","),
        arguments.connections,
        arguments.seconds,
        arguments.share,
    )


if __name__ == "__main__":
    main()
