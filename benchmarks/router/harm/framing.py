"""Measures what a router pays for a byte, however its sender cuts the bytes up, and how long others wait meanwhile.

    python -m benchmarks.router.harm.framing                 all framings, over one connection, then 100 at once for 5 s
    python -m benchmarks.router.harm.framing --connections 100 --seconds 30 --only http
    python -m benchmarks.router.harm.framing --before DIR    the router of another checkout, before this one's

A router without keys runs over a scheduler that computes nothing. For each layer (HTTP/1.1, TLS records, HTTP/2 frames,
gRPC messages) bytes come in pieces of several sizes. ns_per_byte is the router's processor time for a byte on the wire;
times_best compares it with the cheapest framing of the layer. A connection may be cut off: cut_ms is the processor time
that it had cost by then. ping_ms is the longest that another client waited for an answer to GET /ping while so many
connections sent such bytes, each again and again; the first line has that of a quiet router. The router has one core,
its senders and the client another.
"""

import argparse
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.cluster.http_cost import Server, fake_cluster
from benchmarks.cluster.up import ROOT
from benchmarks.router.harm.framings import BYTES, Framing, Sender, flood, framings
from tests.support.certificates import Authority

# Connections one after the other, of which the median counts: the process has other work now and then.
_TRIES = 3
# Seconds: after a connection's last byte, and for a look at an idle router.
_AFTER_S, _IDLE_S = 0.3, 3.0


def _cpu_s(process: psutil.Process) -> float:
    """The processor time of a process's threads, in nanoseconds' resolution."""
    total = 0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Pings(threading.Thread):
    """Another client, on a connection for each request."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self._is_over = port, threading.Event()
        self.longest_s, self.num_failed = 0.0, 0

    def run(self) -> None:
        while not self._is_over.wait(0.01):
            began = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connected:
                    connected.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
                    if not connected.recv(4096).startswith(b"HTTP/1.1 200"):
                        self.num_failed += 1
            except OSError:
                self.num_failed += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@dataclass(slots=True)
class Row:
    layer: str
    framing: str
    num_bytes: int = 0
    ns_per_byte: float = 0.0
    times_best: float = 0.0
    cut_ms: float | None = None
    ping_ms: float = 0.0
    num_failed_pings: int = 0


class Run:
    def __init__(self, plain: Server, encrypted: Server, ca: Path, connections: int, seconds: float) -> None:
        self._plain, self._encrypted, self._ca = plain, encrypted, ca
        self._connections, self._seconds = connections, seconds
        self._context = ssl.create_default_context(cafile=ca)
        # The share of a core that an idle router takes.
        self._idle_share = self._measure_idle()

    def row(self, framing: Framing) -> Row:
        server, port, context = self._where(framing)
        assert server.router is not None
        row, tries = Row(framing.layer, framing.name), list[tuple[float, int, bool]]()
        for _ in range(1 + _TRIES):
            sender = Sender(framing, port, context)
            began, before = time.monotonic(), _cpu_s(server.router)
            num_bytes, is_cut = sender.send(BYTES)
            time.sleep(_AFTER_S)
            # A sender may wait for seconds until it is cut off: what an idle router does meanwhile is not its doing.
            idle = self._idle_share * (time.monotonic() - began)
            tries.append((max(0.0, _cpu_s(server.router) - before - idle), num_bytes, is_cut))
            sender.close()
            time.sleep(_AFTER_S)
        # The first connection pays for what is loaded once.
        used, row.num_bytes, is_cut = sorted(tries[1:])[_TRIES // 2]
        row.ns_per_byte = 1e9 * used / max(1, row.num_bytes)
        row.cut_ms = 1000 * used if is_cut else None
        if self._connections:
            row.ping_ms, row.num_failed_pings = self._pinged(framing, server)
        return row

    def _measure_idle(self) -> float:
        router = self._plain.router
        assert router is not None
        # It starts first.
        time.sleep(_IDLE_S)
        before = _cpu_s(router)
        time.sleep(_IDLE_S)
        return (_cpu_s(router) - before) / _IDLE_S

    def quiet_ms(self) -> float:
        pings = Pings(self._plain.http_port)
        pings.start()
        time.sleep(self._seconds)
        pings.stop()
        return 1000 * pings.longest_s

    def _pinged(self, framing: Framing, server: Server) -> tuple[float, int]:
        is_tls = framing.layer == "tls"
        pings = _TlsPings(server.http_port, self._context) if is_tls else Pings(server.http_port)
        command = [
            *(sys.executable, "-m", "benchmarks.router.harm.framing", "--flood", f"{framing.layer}/{framing.name}"),
            *("--connections", str(self._connections), "--seconds", str(self._seconds), "--ca", str(self._ca)),
            *("--port", str(self._where(framing)[1])),
        ]
        with subprocess.Popen(command, cwd=ROOT, preexec_fn=lambda: os.nice(5)) as flooding:
            # It starts Python first.
            time.sleep(2.0)
            pings.start()
            flooding.wait()
            pings.stop()
        time.sleep(1.0)
        return 1000 * pings.longest_s, pings.num_failed

    def _where(self, framing: Framing) -> tuple[Server, int, ssl.SSLContext | None]:
        if framing.layer == "tls":
            return self._encrypted, self._encrypted.http_port, self._context
        server = self._plain
        return server, server.http_port if framing.layer == "http" else server.port, None


class _TlsPings(Pings):
    """The same over TLS, on one connection: a handshake costs as much as ten answers."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port)
        self._context = context

    def run(self) -> None:
        connected: ssl.SSLSocket | None = None
        while not self._is_over.wait(0.01):
            try:
                if connected is None:
                    plain = socket.create_connection(("127.0.0.1", self._port), timeout=60)
                    connected = self._context.wrap_socket(plain, server_hostname="127.0.0.1")
                began = time.monotonic()
                connected.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
                if not connected.recv(4096):
                    connected.close()
                    connected = None
                    continue
            except OSError:
                self.num_failed += 1
                connected = None
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - began)
        if connected is not None:
            connected.close()


@contextlib.contextmanager
def _routers(source: Path) -> Iterator[tuple[Server, Server, Path]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        authority = Authority(Path(directory) / "ca")
        certificate, key = authority.sign("router")
        plain = stack.enter_context(fake_cluster("plain", source))
        flags = (f"--tls-cert-file={certificate}", f"--tls-key-file={key}")
        encrypted = stack.enter_context(fake_cluster("tls", source, *flags, ca=authority.ca))
        yield plain, encrypted, authority.ca


def _measure(source: Path, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    chosen = [each for each in framings() if each.layer.startswith(arguments.only)]
    with _routers(source) as (plain, encrypted, ca):
        run = Run(plain, encrypted, ca, arguments.connections, arguments.seconds)
        say(f"{source.name}: the longest ping of a quiet router: {run.quiet_ms():.0f} ms")
        names = f"{'layer':6} {'framing':22} {'MiB':>7} {'ns_per_byte':>11} {'times_best':>10} {'cut_ms':>7}"
        say(f"{names} {'ping_ms':>8} failed")
        best: dict[str, float] = {}
        for framing in chosen:
            row = run.row(framing)
            best.setdefault(row.layer, row.ns_per_byte)
            row.times_best = row.ns_per_byte / best[row.layer]
            if arguments.json:
                say(json.dumps({name: getattr(row, name) for name in Row.__slots__}))
                continue
            cut = "-" if row.cut_ms is None else f"{row.cut_ms:.1f}"
            say(
                f"{row.layer:6} {row.framing:22} {row.num_bytes / 2**20:7.2f} {row.ns_per_byte:11.1f} "
                f"{row.times_best:10.1f} {cut:>7} {row.ping_ms:8.0f} {row.num_failed_pings or ''}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=100, help="at once, beside pings; 0: none")
    parser.add_argument("--seconds", type=float, default=5.0, help="that they send")
    parser.add_argument("--only", default="", help="a layer: http, tls, http2 or grpc")
    parser.add_argument("--before", type=Path, help="another checkout, whose router is measured first")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ca", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        (framing,) = (each for each in framings() if f"{each.layer}/{each.name}" == arguments.flood)
        context = ssl.create_default_context(cafile=arguments.ca) if framing.layer == "tls" else None
        flood(framing, arguments.port, context, arguments.connections, arguments.seconds)
        return
    for source in [arguments.before, ROOT] if arguments.before else [ROOT]:
        _measure(source, arguments, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
