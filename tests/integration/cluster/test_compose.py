"""docker-compose.yml works: its commands, environment and health checks, with tcp and CURVE between processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, SamplingParams
from runtime.process import cache_directory
from tests.support.deploy.compose import Cluster

START_TIMEOUT = 120.0
PROCESSES = ("scheduler-0", "scheduler-1", "worker-0", "worker-1", "router")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # The cache volume is already filled: converting the tokenizer takes seconds and is tested elsewhere.
    cache = str(cache_directory())
    with Cluster(tmp_path, OCTAVO_CACHE_DIR=cache, OCTAVO_WORKER_THREADS="1", HF_HUB_OFFLINE="1") as cluster:
        yield cluster


def test_the_services_answer_through_the_router_and_end_in_order(cluster: Cluster):
    assert cluster.run("keys") == 0, cluster.log("keys")
    secret = (cluster.directory / "keys" / "worker.key_secret").read_text()
    # `docker compose up` runs it again, while workers may use the keys.
    assert cluster.run("keys") == 0, cluster.log("keys")
    assert (cluster.directory / "keys" / "worker.key_secret").read_text() == secret

    for service in PROCESSES:
        cluster.start(service)
    for service in PROCESSES:
        cluster.wait_until_healthy(service, START_TIMEOUT)

    with Client(f"127.0.0.1:{cluster.network.port('router', 50051)}") as client:
        answer = client.chat("What is the capital of France? Answer briefly.", SamplingParams(temperature=0.0))
    assert "Paris" in answer.text

    assert cluster.stop() == dict.fromkeys(PROCESSES, 0)
