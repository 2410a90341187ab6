"""Starts an HTTP server as a child, waits until it is healthy, and ends it. Uses only the standard library."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    health: str,
    *,
    environment: Mapping[str, str] | None = None,
    log: int = 2,
    timeout: float = 300.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server; yields its process once GET `health` gives 200. environment: variables in addition to this
    process's. log: a file descriptor for its output.

    Raises RuntimeError if the server ends before that, or is not healthy after `timeout` seconds.
    """
    server = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log)
    try:
        _wait(server, health, time.monotonic() + timeout)
        yield server
    finally:
        end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, and kills it after a minute."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], health: str, deadline: float) -> None:
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"{server.args}: ended with exit code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(health, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{server.args}: GET {health} does not give 200") from None
        time.sleep(0.1)
