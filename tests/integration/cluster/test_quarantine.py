"""A worker of one replica is killed whenever it is back, twelve times: the other replica's streams and the router go
on, and `octavo up` says which replica it has stopped. Real processes."""

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from octavo import SamplingParams
from octavo.client.admin import Admin
from tests.support.models.tiny_model import make_tiny_model
from tests.support.ports import free_ports
from tests.support.streams import say
from tests.support.up import Up

NUM_KILLS = 12
PROMPTS = ["w5 w6 w7", "w9 w8", "w1", "w2 w3"]
SAMPLING = [
    SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=500, ignore_eos=True)
    for number in range(len(PROMPTS))
]


@pytest.fixture
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("quarantine")
    model = make_tiny_model(directory / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    with Up(
        directory,
        f"--model={model}",
        "--load-format=dummy",
        "--dtype=float32",
        "--kv-cache-memory=0.02",
        "--data-parallel-size=2",
        "--max-restarts=2",
        "--max-quarantine=1",
        metrics_port=free_ports(5),
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        up.wait_for(" serves ", count=2)
        yield up


class Killer(threading.Thread):
    """Kills the worker of replica 1 whenever there is another one."""

    def __init__(self, up: Up) -> None:
        super().__init__()
        self._up, self.killed = up, set[int]()

    def run(self) -> None:
        while len(self.killed) < NUM_KILLS and self._up.process.poll() is None:
            for process in self._up.children():
                # It may have gone, or not be a worker yet.
                with contextlib.suppress(psutil.Error):
                    if process.pid in self.killed or process.cmdline()[1:3] != ["-m", "worker"]:
                        continue
                    if process.cmdline()[-4:] == ["--replica", "1", "--rank", "0"]:
                        process.kill()
                        self.killed.add(process.pid)


def test_streams_go_on_beside_a_replica_that_dies_again_and_again(up: Up) -> None:
    """Before, `octavo up` ended after the sixth death within a minute, and all processes with it."""
    expected = say(up.port, PROMPTS, SAMPLING, lambda: None)
    others = {process.pid for kind in ("router", "scheduler") for process in up.children_of(kind)[:1]}
    killer = Killer(up)
    assert say(up.port, PROMPTS, SAMPLING, killer.start) == expected
    while killer.is_alive():
        assert say(up.port, PROMPTS, SAMPLING, lambda: None) == expected
    killer.join()
    assert len(killer.killed) == NUM_KILLS
    assert up.process.poll() is None
    assert others <= {process.pid for process in up.children()}, "the router and the other replica were not touched"
    # The third death within a minute is one too many.
    up.wait_for("replica 1 is in quarantine: its processes are stopped, and tried again in 1 s", count=NUM_KILLS // 3)
    up.wait_for("after a quarantine, with all of replica 1", count=NUM_KILLS // 3)
    assert not any("replica 0 is in quarantine" in line for line in up.lines)
    up.wait_for(" serves ", count=3)
    with Admin(f"localhost:{up.port}") as admin:
        assert admin.observe().replicas[0].state == "ready"
    with urllib.request.urlopen(f"http://127.0.0.1:{up.metrics_port}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    counts = [line for line in metrics.splitlines() if line.startswith("octavo_replica_quarantines_total")]
    assert sorted(line.split()[-1] for line in counts) == ["0.0", f"{NUM_KILLS // 3}.0"]
    up.interrupt()
    assert up.wait() == 0
