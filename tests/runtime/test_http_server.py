"""runtime.telemetry.http_server: probes and scrapes see the current state; a port in use is an error at once."""

import socket
import urllib.error
import urllib.request

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from runtime.telemetry.http_server import ObservabilityServer


@pytest.fixture
def served():
    state = {"healthy": True}
    registry = CollectorRegistry()
    Counter("octavo_things", "Things.", registry=registry).inc(3)
    server = ObservabilityServer("127.0.0.1", 0, registry, lambda: (state["healthy"], "as it is"))
    server.start()
    yield server, state
    server.stop()


def get(server: ObservabilityServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_follows_the_process(served):
    server, state = served
    assert get(server, "/health") == (200, "as it is\n")
    state["healthy"] = False
    assert get(server, "/health") == (503, "as it is\n")


def test_metrics_and_unknown_paths(served):
    server, _ = served
    status, text = get(server, "/metrics")
    assert status == 200
    assert "octavo_things_total 3.0" in text
    assert get(server, "/other")[0] == 404


def test_a_taken_port_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        ObservabilityServer("127.0.0.1", taken.getsockname()[1], CollectorRegistry(), lambda: (True, ""))


def test_an_error_in_a_collector_is_logged_and_the_scrape_fails(caplog: pytest.LogCaptureFixture):
    def fail() -> tuple[bool, str]:
        raise ZeroDivisionError

    server = ObservabilityServer("127.0.0.1", 0, CollectorRegistry(), fail)
    server.start()
    try:
        assert get(server, "/health") == (500, "the log of this process has the cause\n")
        assert "cannot show /health" in caplog.text
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:9090", 200), ("127.0.0.1", 200), ("evil.example:9090", 403), ("a.example", 403)]
)
def test_a_server_of_one_machine_answers_to_no_name_of_a_site(host: str, status: int) -> None:
    """A page whose name leads here (DNS rebinding) reads no metrics."""
    server = ObservabilityServer("127.0.0.1", 0, CollectorRegistry(), lambda: (True, "well"))
    server.start()
    try:
        for path in ("/metrics", "/health"):
            answer = httpx.get(f"http://127.0.0.1:{server.port}{path}", headers={"host": host})
            assert answer.status_code == status
            if status == 403:
                assert f"Host={host!r}: use localhost" in answer.text
    finally:
        server.stop()
