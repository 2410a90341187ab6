"""runtime.telemetry.http_server: clients that are slow, silent or many keep no probe waiting. Real sockets."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Info

from runtime.telemetry import http_server
from runtime.telemetry.http_server import ObservabilityServer
from tests.support.repository import ROOT

# zmq loads libgcc, as it does in every service. A thread that Python ends at exit needs it, and without a descriptor it
# could not be opened then.
FEW_DESCRIPTORS = """
import resource, sys
import zmq
from prometheus_client import CollectorRegistry
from runtime.telemetry.http_server import ObservabilityServer

resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
server = ObservabilityServer("127.0.0.1", 0, CollectorRegistry(), lambda: (True, "well"))
server.start()
print(server.port, flush=True)
sys.stdin.read()
"""
# A probe of `octavo up` or Kubernetes waits for a second.
PROBE_S = 1.0


@pytest.fixture(name="server")
def _server() -> Iterator[ObservabilityServer]:
    registry = CollectorRegistry()
    # More than the kernel buffers for a client that does not read.
    Info("octavo_text", "A long one.", registry=registry).info({"text": "x" * 30_000_000})
    server = ObservabilityServer("127.0.0.1", 0, registry, lambda: (True, "well"))
    server.start()
    yield server
    server.stop()


def probe(server: ObservabilityServer) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=PROBE_S) as answer:
        assert answer.read() == b"well\n"


def num_threads() -> int:
    return sum("process_request_thread" in each.name for each in threading.enumerate())


class Dribbling:
    """Connections that send a byte each 0.2 s; one that the server closes is opened again."""

    def __init__(self, port: int, count: int, address: str = "127.0.0.1") -> None:
        self._port, self._count, self._address = port, count, address
        self._is_over = threading.Event()
        self._have_taken_all = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Dribbling":
        self._thread.start()
        assert self._have_taken_all.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _connect(self) -> socket.socket | None:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", self._port), timeout=0.05, source_address=(self._address, 0))
        return None

    def _run(self) -> None:
        open_ones: list[socket.socket | None] = [None] * self._count
        while not self._is_over.wait(0.2):
            for index, each in enumerate(open_ones):
                connected = open_ones[index] = each or self._connect()
                if connected is None:
                    continue
                try:
                    connected.send(b"G")
                except OSError:
                    connected.close()
                    open_ones[index] = None
            if num_threads() >= http_server._MOST_CONNECTIONS - 2:
                self._have_taken_all.set()
        for each in open_ones:
            if each is not None:
                each.close()


def test_slow_bytes_disable_no_probe(server: ObservabilityServer) -> None:
    """Before: no probe was answered while they went on."""
    with Dribbling(server.port, 80):
        for _ in range(20):
            probe(server)
            time.sleep(0.1)
    assert num_threads() <= http_server._MOST_CONNECTIONS + 10


def test_an_address_with_many_connections_makes_room_by_its_own(server: ObservabilityServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as slow, Dribbling(server.port, 80, "127.0.0.2"):
        time.sleep(1)
        slow.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        slow.settimeout(PROBE_S)
        assert slow.recv(15) == b"HTTP/1.0 200 OK"


@pytest.mark.parametrize("kind", ["silent", "slow bytes", "does not read", "sends without end"])
def test_a_request_has_one_deadline(server: ObservabilityServer, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Before: each byte began a new 5 s, and a response had as long for each piece."""
    monkeypatch.setattr(http_server, "_REQUEST_S", 1.0)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        if kind == "does not read":
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        client.settimeout(0.05)
        until = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while num_threads() or time.monotonic() < until - 19.5:
                assert time.monotonic() < until, "the connection is still served"
                if kind == "slow bytes":
                    client.sendall(b"x")
                if kind == "sends without end":
                    with contextlib.suppress(TimeoutError):
                        client.sendall(b"X-Long: " + b"x" * 1000 + b"\r\n")
                else:
                    time.sleep(0.05)
    while num_threads():
        assert time.monotonic() < until, "its thread is still there"
        time.sleep(0.01)


def test_a_thread_that_cannot_start_takes_no_place(
    server: ObservabilityServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: its place was never given back."""
    with monkeypatch.context() as patched:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(http_server._MOST_CONNECTIONS + 5):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.settimeout(20)
                assert client.recv(1) == b""
    probe(server)


def test_slow_connections_give_way_when_descriptors_are_used_up() -> None:
    """Before: each kept its descriptor for 5 s, and the server span meanwhile."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", FEW_DESCRIPTORS], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=3) as answer:
            assert answer.read() == b"well\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
