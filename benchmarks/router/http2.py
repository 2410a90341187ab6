"""gRPC calls at the level of HTTP/2 frames (RFC 9113), to read many streams at little cost.

A gRPC library spends as much on reading a message as a router spends on writing it, so a benchmark would measure the
library. Here a message costs a microsecond. It has only what a reading client needs: no TLS, no compression, requests
of a few KB, and windows so large that they never hold anything back.
"""

import socket
import struct
import time
from dataclasses import dataclass, field

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_HEADER_BYTES, _PREFIX_BYTES = 9, 5
_LARGEST_WINDOW, _FIRST_WINDOW = 2**31 - 1, 65_535
_SETTING_ENABLE_PUSH, _SETTING_INITIAL_WINDOW, _SETTING_MAX_FRAME = 2, 4, 5
_LARGEST_FRAME = 2**24 - 1


@dataclass(slots=True)
class Call:
    """One call and its messages so far. Times are on time.monotonic()."""

    # When the last byte of a message was read, and the message.
    messages: list[tuple[float, bytes]] = field(default_factory=list)
    # The raw payload of the server's last frame (trailers), once the call has ended.
    ended: str = ""
    # Bytes of an incomplete message.
    _rest: bytes = b""

    def feed(self, now: float, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        start = 0
        while len(data) - start >= _PREFIX_BYTES:
            end = start + _PREFIX_BYTES + int.from_bytes(data[start + 1 : start + _PREFIX_BYTES])
            if end > len(data):
                break
            self.messages.append((now, data[start + _PREFIX_BYTES : end]))
            start = end
        self._rest = data[start:]


class Connection:
    """One HTTP/2 connection with any number of calls. Not thread-safe."""

    def __init__(self, address: str) -> None:
        """address: HOST:PORT, or unix:PATH."""
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._authority = b"localhost"
        self._calls: dict[int, Call] = {}
        self._num_calls = 0
        self._rest = b""
        settings = struct.pack(
            ">HIHIHI",
            *(_SETTING_ENABLE_PUSH, 0, _SETTING_INITIAL_WINDOW, _LARGEST_WINDOW, _SETTING_MAX_FRAME, _LARGEST_FRAME),
        )
        window = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

    def call(self, path: str, request: bytes, *, more: bool = False) -> Call:
        """Begins a call. path: /package.Service/Method. more: leaves the request stream open (nothing can be added)."""
        stream = 2 * self._num_calls + 1
        self._num_calls += 1
        call = self._calls[stream] = Call()
        message = struct.pack(">BI", 0, len(request)) + request
        self.socket.sendall(
            _frame(_HEADERS, _END_HEADERS, stream, self._headers(path))
            + _frame(_DATA, 0 if more else _END_STREAM, stream, message)
        )
        return call

    def read(self) -> bool:
        """Reads what has arrived, or waits for something. Returns False once the peer has closed the connection."""
        received = self.socket.recv(1 << 20)
        now = time.monotonic()
        data = self._rest + received if self._rest else received
        start, length = 0, len(data)
        while length - start >= _HEADER_BYTES:
            head = int.from_bytes(data[start : start + 4])
            end = start + _HEADER_BYTES + (head >> 8)
            if end > length:
                break
            stream = int.from_bytes(data[start + 5 : start + _HEADER_BYTES])
            self._take(now, head & 0xFF, data[start + 4], stream, data[start + _HEADER_BYTES : end])
            start = end
        self._rest = data[start:]
        return bool(received)

    def close(self) -> None:
        self.socket.close()

    def _take(self, now: float, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA and stream in self._calls:
            self._calls[stream].feed(now, payload)
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server sent GOAWAY: {payload[8:].decode(errors='replace')}")
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            # A server may reset a stream that it has ended already.
            call = self._calls.pop(stream, None)
            if call is not None:
                call.ended = payload.decode(errors="replace") or "no reason given"

    def _headers(self, path: str) -> bytes:
        """Encodes HPACK (RFC 7541) without a dynamic table: names by number in the static table, values literally."""
        return b"".join(
            (
                b"\x83\x86",  # :method POST, :scheme http
                b"\x04" + _string(path.encode()),
                b"\x01" + _string(self._authority),
                b"\x0f\x10" + _string(b"application/grpc"),  # content-type
                b"\x00" + _string(b"te") + _string(b"trailers"),
            )
        )


def _string(value: bytes) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload
