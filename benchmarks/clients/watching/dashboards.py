"""Runs a real Prometheus against a cluster under load: each panel's query gives data, each alert fires at its fault.

Reads deploy/grafana/octavo.json and deploy/prometheus/alerts.yml. Prints a line a query and an alert, and ends with
exit code 1 if one gave nothing. Needs the program prometheus (Debian: `apt-get install prometheus`); takes up to ten
minutes.
"""

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.clients.watching.load import HOST, Cluster, cluster, loaded
from benchmarks.cluster.up import ROOT
from octavo.client.admin import Admin
from octavo.client.errors import OctavoError

_DASHBOARD = ROOT / "deploy/grafana/octavo.json"
_ALERTS = ROOT / "deploy/prometheus/alerts.yml"
_PORT = 19_990
_METRICS_PORT = 18_950
# A router, two schedulers, two workers.
_NUM_PROCESSES = 5
_FIRES_S = 180.0
# Rates are taken over a minute.
_SETTLES_S = 90.0
# Few blocks and a short queue: preemptions and refusals come at once. Drafts for the panels on speculation.
_FLAGS = (
    *("--kv-cache-memory=0.02", "--max-num-seqs=16", "--max-queued-requests=4"),
    '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}',
)


class Prometheus:
    """Scrapes the cluster's processes each second."""

    def __init__(self, directory: Path) -> None:
        targets = [f"{HOST}:{_METRICS_PORT + i}" for i in range(_NUM_PROCESSES)]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(_ALERTS)],
            "scrape_configs": [{"job_name": "octavo", "static_configs": [{"targets": targets}]}],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={HOST}:{_PORT}",
                "--log.level=error",
            ]
        )

    def query(self, expression: str) -> list[Any]:
        """Returns the series that have a value now."""
        answer = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")
        return [each for each in answer["result"] if each["value"][1] != "NaN"]

    def firing(self) -> set[str]:
        return {each["labels"]["alertname"] for each in self._get("alerts")["alerts"] if each["state"] == "firing"}

    def pending(self) -> set[str]:
        """Returns the alerts that fire, or will if their conditions last."""
        return {each["labels"]["alertname"] for each in self._get("alerts")["alerts"]}

    def wait(self) -> None:
        """Waits until it answers and all targets are up. Raises SystemExit."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if len(self.query("up == 1")) == _NUM_PROCESSES:
                    return
            time.sleep(0.5)
        raise SystemExit(f"after 60 s not all of {_NUM_PROCESSES} processes are scraped")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{_PORT}/api/v1/{path}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise SystemExit(f"Prometheus refuses {urllib.parse.unquote(path)}: {error.read().decode()}") from None


# --- Panels


def queries() -> list[tuple[str, str]]:
    """Returns each panel's title and query, with Grafana's variables filled in."""
    panels = json.loads(_DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*"))
        for panel in panels
        for target in panel.get("targets", ())
    ]


def cause_rare_events(running: Cluster) -> None:
    """Has a request refused and one moved: some panels show such things alone."""
    body = json.dumps({"prompt": "x", "max_tokens": 4, "top_p": 7}).encode()
    request = urllib.request.Request(f"{running.url}/v1/completions", body, {"content-type": "application/json"})
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=20)
    with Admin(f"{HOST}:{running.port}") as admin:
        for view in admin.observe().requests:
            with contextlib.suppress(OctavoError):
                admin.migrate(view.request_id)
                return


def check_panels(prometheus: Prometheus) -> bool:
    empty = []
    for title, expression in queries():
        found = prometheus.query(expression)
        print(f"{'ok' if found else 'EMPTY':6}{len(found):4} series  {title}: {expression}", flush=True)
        if not found:
            empty.append(title)
    print(f"{len(queries()) - len(empty)} of {len(queries())} queries gave data\n", flush=True)
    return not empty


# --- Alerts


@contextlib.contextmanager
def repeated(act: Callable[[], None]) -> Iterator[None]:
    """Does something over and over meanwhile."""
    is_over = threading.Event()

    def acting() -> None:
        while not is_over.is_set():
            act()

    thread = threading.Thread(target=acting, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(30)


@contextlib.contextmanager
def a_lost_replica(running: Cluster) -> Iterator[None]:
    # A scheduler that stands still is restarted at once, unless `octavo up` stands still, too.
    stopped = [psutil.Process(running.up), running.process("scheduler", 1)]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@contextlib.contextmanager
def too_few_blocks(running: Cluster) -> Iterator[None]:
    with loaded(running, 24, max_tokens=400):
        yield


@contextlib.contextmanager
def a_full_queue(running: Cluster) -> Iterator[None]:
    with loaded(running, 80, max_tokens=400):
        yield


@contextlib.contextmanager
def a_router_that_stands_still(running: Cluster) -> Iterator[None]:
    router = running.process("router")

    def pulse() -> None:
        router.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        router.send_signal(signal.SIGCONT)
        time.sleep(0.4)

    with repeated(pulse):
        yield


@contextlib.contextmanager
def a_worker_that_dies_again_and_again(running: Cluster) -> Iterator[None]:
    # After six deaths within a minute there is only the other replica's worker.
    victim = running.process("worker", 1)
    place = victim.cmdline()[-4:]

    def kill() -> None:
        for process in psutil.Process(running.up).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-4:] == place:
                    process.kill()
        time.sleep(0.5)

    with repeated(kill):
        yield


FAULTS = {
    "OctavoReplicaLost": a_lost_replica,
    "OctavoPreemptionsGrow": too_few_blocks,
    "OctavoQueueFull": a_full_queue,
    "OctavoLoopLag": a_router_that_stands_still,
    # The last one, for its replica comes back a minute later.
    "OctavoReplicaQuarantined": a_worker_that_dies_again_and_again,
}


def check_alerts(prometheus: Prometheus, running: Cluster) -> bool:
    """Makes each fault, and waits for its alert. None may fire before its fault is made."""
    rules = {rule["alert"] for group in yaml.safe_load(_ALERTS.read_text())["groups"] for rule in group["rules"]}
    assert rules == FAULTS.keys(), f"alerts without a fault, or the reverse: {rules ^ FAULTS.keys()}"
    num_good = 0
    for alert, fault in FAULTS.items():
        # A fault may cause another one, such as a queue that is full of preempted requests; it is over first.
        deadline = time.monotonic() + _SETTLES_S
        while (early := alert in prometheus.pending()) and time.monotonic() < deadline:
            time.sleep(0.5)
        began = time.monotonic()
        with fault(running):
            while not (fires := alert in prometheus.firing()) and time.monotonic() - began < _FIRES_S:
                time.sleep(0.5)
        seconds = time.monotonic() - began
        verdict = "fired before its fault" if early else f"fires after {seconds:.0f} s" if fires else "DOES NOT FIRE"
        print(f"{alert}: {verdict} ({fault.__name__.replace('_', ' ')})", flush=True)
        num_good += fires and not early
    return num_good == len(FAULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("there is no program prometheus: apt-get install prometheus")
    with cluster(*_FLAGS, metrics_port=_METRICS_PORT) as running, tempfile.TemporaryDirectory() as directory:
        prometheus = Prometheus(Path(directory))
        try:
            prometheus.wait()
            with loaded(running, 8, max_tokens=60):
                time.sleep(10)
                cause_rare_events(running)
                time.sleep(20)
                good = check_panels(prometheus)
            good &= check_alerts(prometheus, running)
        finally:
            prometheus.close()
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
